"""Collectives."""

from typing import Any

import torch

from pannier.comm import *  # noqa: F403

from ..missing import explain


def __getattr__(name: str) -> Any:
    # As DeepSpeed's module does, it has what torch.distributed has.
    if not name.startswith("_") and hasattr(torch.distributed, name):
        return getattr(torch.distributed, name)
    raise AttributeError(explain(f"deepspeed.comm.{name}"))
