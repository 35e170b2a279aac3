"""ZeRO's helpers for one rank, where every parameter is whole and in place."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from pannier import managed

if TYPE_CHECKING:
    from pannier.engine import Engine


class ZeroParamStatus(enum.Enum):
    """Whether a parameter is whole on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """How a parameter is kept over ranks."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class Init:
    """Builds a model whose parameters are sharded from the start; with one rank, an ordinary model."""

    def __init__(self, module: torch.nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.module = module
        self.enabled = enabled

    def __enter__(self) -> Init:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class GatheredParameters:
    """Whole parameters inside a `with` block. With one rank they are whole anyway; edits inside it count."""

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self.modifier_rank = modifier_rank
        self.enabled = enabled

    def __enter__(self) -> None:
        for engine in self._engines() if self.enabled else ():
            engine.wait_for_parameters()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Edits through `.data` are not counted by torch; who may modify is taken to have done so.
        if self.enabled and self.modifier_rank is not None:
            for engine in self._engines():
                engine.parameters_changed()

    def _engines(self) -> set[Engine]:
        return {owner[0] for param in self.params if (owner := managed.owner_of(param)) is not None}


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Says that `module` uses `parameter` of another module; with one rank there is nothing to do."""


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Takes `register_external_parameter` back."""
