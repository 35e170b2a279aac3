"""The process group, for one rank: what scripts call `deepspeed.comm` for.

`init_distributed` makes a real torch group of one, so that `torch.distributed` works in scripts that use it; without it
every function here answers as a group of one would.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from pannier.errors import ConfigError, UsageError

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_available",
    "is_initialized",
    "require_single_rank",
]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes torch's process group of one rank, unless there is one."""
    if world_size > 1:
        raise ConfigError(f"world_size is {world_size}, but this version of Pannier trains with one rank")
    require_single_rank(dist_init_required)
    if not dist.is_initialized() and dist_init_required is not False:
        # A store inside the process: no port, so two jobs on one machine never meet.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def require_single_rank(dist_init_required: bool | None = None) -> None:
    """Raises where the environment or torch's process group says that there are more ranks than one."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            raise ConfigError(
                f"the process group has {dist.get_world_size()} ranks, but this version of Pannier trains with one rank"
            )
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required is False, but torch's process group is not initialised")
    text = os.environ.get("WORLD_SIZE", "1")
    if text.strip() not in ("", "1"):
        raise ConfigError(
            f"WORLD_SIZE is {text} but the process group is not initialised, and this version of Pannier trains with "
            "one rank"
        )


def is_available() -> bool:
    """Whether torch was built with its distributed package."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether torch's process group is there."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """This process's rank."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """The number of ranks."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """This process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """The group of all ranks, None without one."""
    return dist.group.WORLD if is_initialized() else None


def barrier(*args: Any, **kwargs: Any) -> None:
    """Waits for all ranks."""
    if is_initialized():
        dist.barrier(kwargs.get("group") or (args[0] if args else None))


def broadcast(tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
    """Sends `src`'s tensor to all."""
    return dist.broadcast(tensor, src, group, async_op) if is_initialized() else None


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Combines the tensor over ranks, in place."""
    return dist.all_reduce(tensor, op, group, async_op) if is_initialized() else None


def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Collects every rank's tensor."""
    if is_initialized():
        return dist.all_gather(tensor_list, tensor, group, async_op)
    tensor_list[0].copy_(tensor)
    return None


def destroy_process_group(group: Any = None) -> None:
    """Ends torch's process group."""
    if is_initialized():
        dist.destroy_process_group(group)
