"""Collectives."""

from typing import Any

from pannier.comm import *  # noqa: F403


def __getattr__(name: str) -> Any:
    raise AttributeError(f"deepspeed.comm is Pannier's here, which has no {name}; torch.distributed may")
