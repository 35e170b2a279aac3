"""Which parameters belong to a living engine.

The one table that maps a parameter to its engine and its index there. It holds parameters and engines weakly, and lives
outside of both, so that modules copy and pickle without dragging an engine along.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from pannier.engine import Engine

# Process-wide by nature: a parameter is managed or not, whoever asks.
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def register(engine: Engine, params: Sequence[torch.Tensor]) -> None:
    """Makes `engine` the owner of `params`, in the core's order."""
    owner = weakref.ref(engine)
    for index, param in enumerate(params):
        _owners[param] = (owner, index)


def release(params: Iterable[torch.Tensor]) -> None:
    """Forgets the owner of `params`."""
    for param in params:
        _owners.pop(param, None)


def owner_of(param: torch.Tensor) -> tuple[Engine, int] | None:
    """The living engine that manages `param`, and the parameter's index there."""
    entry = _owners.get(param)
    if entry is None:
        return None
    engine = entry[0]()
    return None if engine is None or engine.is_closed else (engine, entry[1])


def plain_name(name: str) -> str:
    """A parameter's or buffer's name as it is without torch.compile, whose wrappers add a part of their own."""
    return name.replace("_orig_mod.", "")
