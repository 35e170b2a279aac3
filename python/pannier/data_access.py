"""Notices who takes a managed parameter's `.data`, through which people write (`p.data.clamp_(-c, c)`).

Torch counts every other write, and not these. Where the engine keeps values of its own beside the parameter, they would
be lost at the next update: so it remembers the bits when somebody takes `.data`, and compares when it steps.
"""

from __future__ import annotations

import functools

import torch

from pannier import managed

_DATA = torch._C.TensorBase.data


@functools.cache
def watch() -> None:
    """Starts watching; called by the first `initialize`."""
    torch.nn.Parameter.data = property(_take, _replace)  # type: ignore[assignment,misc]


def _take(param: torch.nn.Parameter) -> torch.Tensor:
    if not torch.compiler.is_compiling() and (owner := managed.owner_of(param)) is not None:
        owner[0].data_is_taken(owner[1])
    return _DATA.__get__(param)  # type: ignore[no-any-return]


def _replace(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    _DATA.__set__(param, value)  # Torch counts this.
