"""Recomputation of activations."""

from . import checkpointing

__all__ = ["checkpointing"]
