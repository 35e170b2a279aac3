"""Tells the core which part of the model is about to run, so that it knows when activations need the room.

A unit is what a model has a row of (the elements of its ModuleLists and Sequentials), or a module outside of those that
has parameters of its own. A module that was marked as a leaf is one unit with all that is below it. Its forward pre-hook is a plain function that looks its engine up by the module's identity:
modules copy and pickle with it, and a copy, which no engine knows, ticks nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from pannier.engine import Engine

ROWS = (torch.nn.ModuleList, torch.nn.Sequential)
LEAF = "_z3_leaf"
"""The attribute that marks a leaf."""
# Process-wide by nature, like the table of managed parameters: a module is some engine's unit or nobody's.
_ticked: WeakIdKeyDictionary = WeakIdKeyDictionary()


def units_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The units of `model`, each once, in the order in which the model names them."""
    units: dict[int, torch.nn.Module] = {}
    _visit(model, False, units, set())
    return list(units.values())


# Not a closure: one that calls itself would keep the model alive until Python's collector comes by.
def _visit(module: torch.nn.Module, in_row: bool, units: dict[int, torch.nn.Module], seen: set[int]) -> None:
    if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    if getattr(module, LEAF, False):
        units[id(module)] = module
        return
    is_row = isinstance(module, ROWS)
    if not is_row and (in_row or any(True for _ in module.parameters(recurse=False))):
        units[id(module)] = module
    if is_row or not in_row:
        for child in module.children():
            _visit(child, is_row, units, seen)


def watch(model: torch.nn.Module, engine: Engine) -> Sequence[RemovableHandle]:
    """Has the units of `model` tick `engine`, counted from 1. Returns the hooks."""
    owner = weakref.ref(engine)
    handles = []
    for index, unit in enumerate(units_of(model), 1):
        _remove_hook(unit)  # One that came with a copy.
        _ticked[unit] = (owner, index)
        handles.append(unit.register_forward_pre_hook(tick))
    return handles


def unwatch(handles: Iterable[RemovableHandle]) -> None:
    """Removes the hooks that `watch` returned."""
    for handle in handles:
        handle.remove()


def tick(module: torch.nn.Module, args: Any) -> None:
    """The hook. In a traced forward it does nothing: what is compiled into one graph has no units."""
    if torch.compiler.is_compiling():
        return
    owner, index = _ticked.get(module, (None, 0))
    engine = None if owner is None else owner()
    if engine is not None:
        engine.tick_forward(index)


def _remove_hook(module: torch.nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is tick]:
        del hooks[key]
