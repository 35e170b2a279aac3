"""Errors of ZeRO."""

from pannier import ConfigError as ZeRORuntimeException

__all__ = ["ZeRORuntimeException"]
