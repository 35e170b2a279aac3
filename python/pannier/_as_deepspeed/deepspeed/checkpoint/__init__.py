"""Helpers around saved tensors."""

from . import utils

__all__ = ["utils"]
