"""ZeRO's helpers: whole parameters where an engine keeps them partitioned (stage 3)."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from pannier import comm, early, managed, sharded

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
    """Builds a model in shares: with several ranks, a module's parameters are partitioned when it becomes a part of
    another one, and those that are left when the block ends. Until `initialize` takes the model they are whole inside
    `GatheredParameters` only. Values are rank 0's. With one rank nothing is different.

    `Module.apply` finds each module's own parameters whole, and what it writes on rank 0 counts: models initialize the
    weights of their parts so. All ranks build the same model. Of the arguments `module` (partitioned at once) and `enabled` are looked at. torch's
    constructors are left alone.
    """

    def __init__(self, module: torch.nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.module = module
        self.enabled = enabled
        self._hooks: list[RemovableHandle] = []
        self._noted: list[weakref.ref[torch.nn.Parameter]] = []
        self._apply: Callable[..., Any] | None = None
        if module is not None and enabled:
            comm.ensure_group()
            for param in module.parameters():
                _made[param] = True
            early.partition(module.parameters())

    def __enter__(self) -> Init:
        if self.enabled:
            comm.ensure_group()
            self._hooks = [
                register_module_parameter_registration_hook(self._note_parameter),
                register_module_module_registration_hook(_partition_part),
            ]
            self._apply = torch.nn.Module.apply
            torch.nn.Module.apply = _apply_to_whole(self._apply)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._apply is not None:
            torch.nn.Module.apply, self._apply = self._apply, None  # type: ignore[method-assign]
        noted, self._noted = self._noted, []
        if kind is None:
            early.partition(param for ref in noted if (param := ref()) is not None)

    def _note_parameter(self, module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None:
            _made[param] = True
            self._noted.append(weakref.ref(param))


def _apply_to_whole(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.apply` that gives its function whole parameters."""

    def apply_to_whole(module: torch.nn.Module, function: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
        if getattr(function, "gathers", False):  # torch's own calls this for the parts.
            return apply(module, function)

        def on_whole(part: torch.nn.Module) -> None:
            with GatheredParameters(part.parameters(recurse=False), modifier_rank=0):
                function(part)

        on_whole.gathers = True  # type: ignore[attr-defined]
        return apply(module, on_whole)

    return apply_to_whole


def _partition_part(module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
    if part is not None:
        early.partition(param for param in part.parameters() if param in _made)


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
        self._early: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self._early = [param for param in self.params if early.is_partitioned(param)] if self.enabled else []
        early.gather(self._early)
        for engine, indices in self._by_engine() if self.enabled else ():
            engine.hold_parameters(indices, watches=True)
            self._held.append((engine, indices))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for engine, indices in self._held:
            engine.let_go_parameters(indices, self.modifier_rank if kind is None else None)
        self._held = []
        early.let_go(self._early, self.modifier_rank if kind is None else None)
        self._early = []

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
