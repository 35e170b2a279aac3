"""The tensors in what a module was given or returns, whatever holds them."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch

_LEAVES = (
    bool, int, float, complex, str, bytes, enum.Enum, type, range, slice, types.ModuleType,
    torch.dtype, torch.device, torch.Size, torch.Generator, torch.nn.Module,
)  # fmt: skip


def plain(tree: Any) -> Iterator[torch.Tensor]:
    """Those in lists, tuples, mappings and dataclasses."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from plain(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from plain(value)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            yield from plain(getattr(tree, name, None))


def with_gradient(output: Any) -> list[torch.Tensor]:
    """Those that require a gradient; where there is none, those in sets, deques and attributes of objects too."""
    # In that order, since a cache of keys and values holds those of other modules, and mostly comes beside a plain tensor.
    found = [tensor for tensor in plain(output) if tensor.requires_grad]
    return found or [leaf for leaf in _leaves(output, set()) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def opaque_kind(output: Any) -> str | None:
    """The type of something in `output` that may hold tensors, but does not show them: an iterator, a function."""
    for leaf in _leaves(output, set()):
        if leaf is not None and not isinstance(leaf, (torch.Tensor, *_LEAVES)) and type(leaf).__module__ != "numpy":
            return type(leaf).__name__
    return None


def _leaves(tree: Any, seen: set[int]) -> Iterator[Any]:
    if tree is None or isinstance(tree, (torch.Tensor, *_LEAVES)):
        yield tree
        return
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, (list, tuple, Set, deque)):
        parts = list(tree)
    elif callable(tree) or isinstance(tree, Iterator):
        parts = []
    else:
        slots = [name for kind in type(tree).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
        parts = [*getattr(tree, "__dict__", {}).values(), *(getattr(tree, name, None) for name in slots)]
    if not parts and not isinstance(tree, (Mapping, list, tuple, Set, deque)):
        yield tree
    for part in parts:
        yield from _leaves(part, seen)


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)
