"""Command-line arguments of training scripts, by DeepSpeed's names."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` (and their old names) to `parser`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configuration")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; changes nothing here")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the JSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
