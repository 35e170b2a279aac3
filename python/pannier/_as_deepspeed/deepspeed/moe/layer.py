"""Experts that are cut over ranks."""

from ..absent import absent_class

MoE = absent_class("deepspeed.moe.layer", "MoE")

__all__ = ["MoE"]
