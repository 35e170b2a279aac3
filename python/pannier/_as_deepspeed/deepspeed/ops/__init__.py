"""Optimizers."""

from . import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
