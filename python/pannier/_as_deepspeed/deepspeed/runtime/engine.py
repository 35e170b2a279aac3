"""The engine."""

from pannier import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
