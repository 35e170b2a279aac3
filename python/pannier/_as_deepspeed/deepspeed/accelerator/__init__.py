"""The device that the engine trains on."""

from .real_accelerator import get_accelerator

__all__ = ["get_accelerator"]
