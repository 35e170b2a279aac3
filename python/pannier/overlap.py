"""What `"overlap_step"` needs of the module: which unit reads which parameters, and who waits before looking at them.

With it `step()` returns while the host still updates. A parameter that is not in place yet is released: reading it
raises. Units of the model wait for theirs before they run (`pannier.units`); here are the other places that wait by
themselves: a forward of the module itself, `state_dict()` and `load_state_dict()` of any part of it. Hooks are plain
functions that look the engine up by the module's identity, so that modules copy and pickle with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from pannier import core, units

if TYPE_CHECKING:
    from pannier.engine import Engine

# Process-wide by nature, like the table of managed parameters.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def watch(model: torch.nn.Module, engine: Engine, handle: Any, params: Sequence[torch.Tensor]) -> list[RemovableHandle]:
    """Tells the core which unit reads which of `params`, and has `model` wait where it must. Returns the hooks."""
    if not core.call(handle.overlaps):
        return []
    core.call(handle.set_units, parameters_of_units(model, params))
    owner = weakref.ref(engine)
    hooks = [_renewed(model._forward_pre_hooks, model.register_forward_pre_hook, before_forward, prepend=True)]
    for part in model.modules():
        _owners[part] = owner
        if isinstance(part, torch.jit.ScriptModule):
            continue
        hooks.append(_renewed(part._state_dict_pre_hooks, part.register_state_dict_pre_hook, before_state_dict))
        hooks.append(_renewed(part._load_state_dict_pre_hooks, part.register_load_state_dict_pre_hook, before_load))
    return hooks


def parameters_of_units(model: torch.nn.Module, params: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each unit, counted from 1, the indices in `params` of what it may read; before them, those of no unit.

    A unit may read all that is below it, called or not, but for elements of rows, which are units of their own.
    """
    index_of = {id(param): index for index, param in enumerate(params)}
    all_units = units.units_of(model)
    known = {id(unit) for unit in all_units}
    read = [sorted(_read_by(unit, False, known, index_of)) for unit in all_units]
    in_no_unit = sorted(set(range(len(params))).difference(*read))
    return [in_no_unit, *read]


def _read_by(module: torch.nn.Module, in_row: bool, known_units: set[int], index_of: Mapping[int, int]) -> set[int]:
    if in_row and id(module) in known_units:
        return set()
    found = {index_of[id(param)] for param in module.parameters(recurse=False) if id(param) in index_of}
    for child in module.children():
        found |= _read_by(child, isinstance(module, units.ROWS), known_units, index_of)
    return found


def needs_everything(model: torch.nn.Module) -> bool:
    """Whether a forward must find all parameters in place: one of its parts is compiled, and so has no hooks that run.

    An evaluation counts too, since torch's modules then take short cuts past their own submodules.
    """
    return not model.training or is_compiled(model)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a part of `model` is compiled."""
    return any(
        part._compiled_call_impl is not None or type(part).__module__.startswith("torch._dynamo")
        for part in model.modules()
    )


def before_forward(module: torch.nn.Module, args: Any) -> None:
    """Hook of the whole module, which may be called without its engine."""
    engine = None if torch.compiler.is_compiling() else _engine_of(module)
    if engine is not None:
        engine.wait_before_forward()


def before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook of every part of the module."""
    if (engine := _engine_of(module)) is not None:
        engine.wait_for_parameters()


def before_load(module: torch.nn.Module, *args: Any) -> None:
    """Hook of every part of the module."""
    if (engine := _engine_of(module)) is not None:
        engine.wait_for_parameters()


def _engine_of(module: torch.nn.Module) -> Engine | None:
    owner = _owners.get(module)
    return None if owner is None else owner()


def _renewed(hooks: Any, register: Any, hook: Any, **options: Any) -> RemovableHandle:
    # A copy of a module comes with its hooks.
    for key in [key for key, there in hooks.items() if getattr(there, "hook", there) is hook]:
        del hooks[key]
    return register(hook, **options)
