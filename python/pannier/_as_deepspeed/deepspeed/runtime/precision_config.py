"""The sections of the types of parameters."""

from types import SimpleNamespace
from typing import Any

from .config_sections import read_section

__all__ = ["get_bfloat16_config", "get_float16_config"]


def get_bfloat16_config(param_dict: dict[str, Any]) -> SimpleNamespace:
    """`bf16` of a configuration, with its defaults filled in."""
    return read_section("bf16", param_dict.get("bf16") or param_dict.get("bfloat16") or {})


def get_float16_config(param_dict: dict[str, Any]) -> SimpleNamespace:
    """`fp16` of a configuration, with its defaults filled in."""
    return read_section("fp16", param_dict.get("fp16") or {})
