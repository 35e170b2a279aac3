"""Collectives."""

from typing import Any

from pannier.comm import *  # noqa: F403

from ..missing import explain


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"deepspeed.comm.{name}"))
