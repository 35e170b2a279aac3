"""The optimizer that the engine returns, by one of its names."""

from deepspeed.runtime.optimizer_kinds import BF16_Optimizer

__all__ = ["BF16_Optimizer"]
