"""ZeRO's helpers: whole parameters where an engine keeps them partitioned (stage 3)."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

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


# Process-wide by nature, like the table of managed parameters: what was made under an `Init`.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def was_made_under_init(param: torch.Tensor) -> bool:
    """Whether `param` became a module's inside an `Init`."""
    return param in _made


class Init:
    """Accepted for scripts that have it: the model is built whole, as without, and `initialize` partitions it.

    Of its arguments only `module` and `enabled` are looked at. torch's constructors are left alone.
    """

    def __init__(self, module: torch.nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.module = module
        self.enabled = enabled
        self._hook: RemovableHandle | None = None
        for param in module.parameters() if module is not None and enabled else ():
            _made[param] = True

    def __enter__(self) -> Init:
        if self.enabled:
            self._hook = register_module_parameter_registration_hook(_note_parameter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _note_parameter(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    if param is not None:
        _made[param] = True


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
