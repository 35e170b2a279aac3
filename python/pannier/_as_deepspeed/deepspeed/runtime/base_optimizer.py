"""The optimizer that the engine returns, by its general names."""

from deepspeed.runtime.optimizer_kinds import DeepSpeedOptimizer, ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
