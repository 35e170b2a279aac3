"""Profiler ranges."""

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def instrument_w_nvtx(func: _Function) -> _Function:
    """The function as it is: no profiler listens on a CPU."""
    return func
