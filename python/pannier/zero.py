"""ZeRO's helpers: whole parameters where an engine keeps them partitioned (stage 3)."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from pannier import managed, sharded

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
    """Accepted for scripts that have it: the model is built whole, as without, and `initialize` partitions it."""

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
    """Whole parameters inside a `with` block, which all ranks enter and leave together.

    Edits inside it count. With `modifier_rank` only that rank may make them, and the others get its values; without, all
    ranks must make the same. A block left by an exception exchanges nothing. Parameters that are not partitioned are
    whole anyway.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else params
        self.params = [param for param in given if isinstance(param, torch.Tensor)]  # Callers give a missing bias as None.
        self.modifier_rank = modifier_rank
        self.enabled = enabled
        self._held: list[tuple[Engine, list[int]]] = []

    def __enter__(self) -> None:
        for engine, indices in self._by_engine() if self.enabled else ():
            engine.hold_parameters(indices)
            self._held.append((engine, indices))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for engine, indices in self._held:
            engine.let_go_parameters(indices, self.modifier_rank if kind is None else None)
        self._held = []

    def _by_engine(self) -> list[tuple[Engine, list[int]]]:
        found: dict[int, tuple[Engine, list[int]]] = {}
        for param in self.params:
            if (owner := managed.owner_of(param)) is not None:
                found.setdefault(id(owner[0]), (owner[0], []))[1].append(owner[1])
        return [(engine, sorted(set(indices))) for engine, indices in found.values()]


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Says that `module` uses `parameter` of another module, which is then whole while `module` runs."""
    sharded.external_parameters(module).append(parameter)


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Takes `register_external_parameter` back."""
    known = sharded.external_parameters(module)
    known[:] = [param for param in known if param is not parameter]
