"""Errors of the configuration."""

from pannier import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
