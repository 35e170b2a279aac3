"""The optimizer that the engine returns, by one of its names."""

from pannier import Optimizer as FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
