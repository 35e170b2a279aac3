"""Small helpers that scripts import."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..accelerator import get_accelerator
from ..utils.logging import log_dist

__all__ = ["get_only_unique_item", "move_to_device", "see_memory_usage"]


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """With `force`: logs `message` and the bytes on the device, now and at most."""
    if force:
        accelerator = get_accelerator()
        now, peak = (count / 2**30 for count in (accelerator.memory_allocated(), accelerator.max_memory_allocated()))
        log_dist(f"{message}: {now:.2f} GiB on the device, at most {peak:.2f} GiB", ranks=ranks, level=logging.WARNING)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Any = None) -> Any:
    """`item` with every tensor in it on `device`."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def get_only_unique_item(items: Sequence[Any]) -> Any:
    """The value that all of `items` have."""
    (item,) = set(items)
    return item
