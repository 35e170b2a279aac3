"""Defaults of the configuration that scripts import."""

GRADIENT_CLIPPING_DEFAULT = 1.0
