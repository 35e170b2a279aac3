"""Optimizers."""

from . import adagrad, adam, lion, op_builder

__compatible_ops__ = {name: builder.is_compatible() for name, builder in op_builder.ALL_OPS.items()}

__all__ = ["__compatible_ops__", "adagrad", "adam", "lion", "op_builder"]
