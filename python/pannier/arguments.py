"""Command-line arguments of training scripts, by DeepSpeed's names; and checks of what methods are given."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from pannier.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` (and their old names) to `parser`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configuration")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; changes nothing here")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the JSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def require_size(name: str, value: Any) -> None:
    """Raises for what is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, not {value!r}")


def require_tensor(name: str, value: Any) -> None:
    """Raises for what is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name} must be a tensor, not {value!r}")
