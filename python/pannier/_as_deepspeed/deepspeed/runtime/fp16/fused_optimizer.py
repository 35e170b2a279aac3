"""The optimizer that the engine returns, by one of its names."""

from deepspeed.runtime.optimizer_kinds import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
