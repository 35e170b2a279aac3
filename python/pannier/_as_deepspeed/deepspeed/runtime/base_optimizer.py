"""The optimizer that the engine returns, by one of its names."""

from pannier import Optimizer as DeepSpeedOptimizer
from pannier import Optimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
