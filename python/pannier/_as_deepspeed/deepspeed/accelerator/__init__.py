"""The device that the engine trains on."""

from .real_accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
