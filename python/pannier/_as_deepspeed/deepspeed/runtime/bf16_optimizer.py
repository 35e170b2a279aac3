"""The optimizer that the engine returns, by one of its names."""

from pannier import Optimizer as BF16_Optimizer

__all__ = ["BF16_Optimizer"]
