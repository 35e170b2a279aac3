"""DeepSpeed's names for what stage 3 does to a parameter, for libraries that read them: `ds_status`, `ds_shape` and so on.

They are properties of `torch.nn.Parameter` that ask the engine when read, so that nothing is kept in two places, and
parameters copy and pickle as before. A parameter that is neither of an engine at stage 3 nor made under `zero.Init` has
none of them: `hasattr` says no.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pannier import early, managed, sharded
from pannier.zero import GatheredParameters, ZeroParamStatus, was_made_under_init

if TYPE_CHECKING:
    from pannier.engine import Engine


@functools.cache
def install() -> None:
    """Gives `torch.nn.Parameter` the names."""
    for name, read in _NAMES.items():
        setattr(torch.nn.Parameter, name, property(functools.partial(_read, name, read)))


class ParameterOffload:
    """What libraries take off and put back around generation at stage 3. Hooks can stay: whole parameters are whole."""

    def __init__(self, engine: Engine) -> None:
        self.module = _Parameters(engine.module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def _register_deepspeed_module(self, module: Any) -> None:
        """Hooks were never taken off."""


class _Parameters:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._module.named_parameters(recurse=recurse)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self._module.parameters(recurse=recurse)

    def ds_external_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in self._module.named_modules():
            for number, param in enumerate(sharded.registered_parameters(part)):
                yield f"{name}.external{number}", param


class _Coordinator:
    # The order of gathers is checked at each use, so there is no trace that could be stale.
    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        pass


def _status(param: torch.nn.Parameter, index: int) -> ZeroParamStatus:
    return ZeroParamStatus.NOT_AVAILABLE if sharded.is_away(param) else ZeroParamStatus.AVAILABLE


def _persists(param: torch.nn.Parameter, index: int) -> bool:
    # Whether a parameter stays whole on the device: small ones do.
    owner = managed.owner_of(param)
    if owner is None:
        return False
    return param.numel() <= owner[0].zero_param_persistence_threshold()


def _all_gather(param: torch.nn.Parameter, index: int) -> Any:
    # Until `partition()`; all ranks call it.
    def all_gather(param_list: list[torch.nn.Parameter] | None = None, async_op: bool = False) -> None:
        GatheredParameters([param] if param_list is None else param_list).__enter__()

    return all_gather


def _partition(param: torch.nn.Parameter, index: int) -> Any:
    def partition(param_list: list[torch.nn.Parameter] | None = None, has_been_updated: bool = False) -> None:
        for one in [param] if param_list is None else param_list:
            if (owner := managed.owner_of(one)) is not None:
                owner[0].let_go_parameters([owner[1]])
            elif early.is_partitioned(one):
                early.let_go([one], None)

    return partition


_NAMES: dict[str, Any] = {
    "ds_id": lambda param, index: index,
    "ds_shape": lambda param, index: param.shape,
    "ds_numel": lambda param, index: param.numel(),
    "ds_status": _status,
    "ds_persist": _persists,
    "ds_active_sub_modules": lambda param, index: set(),
    "ds_process_group": lambda param, index: None,
    "all_gather": _all_gather,
    "partition": _partition,
}


def _read(name: str, read: Any, param: torch.nn.Parameter) -> Any:
    owner = managed.owner_of(param)
    if owner is not None and owner[0].zero_optimization_stage() == 3:
        return read(param, owner[1])
    if owner is None and (was_made_under_init(param) or early.is_partitioned(param)):
        return read(param, id(param))
    raise AttributeError(f"'{type(param).__name__}' object has no attribute '{name}': no engine partitions it")
