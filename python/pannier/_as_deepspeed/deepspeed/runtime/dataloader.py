"""Loaders."""

from pannier import Loader as DeepSpeedDataLoader
from pannier import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
