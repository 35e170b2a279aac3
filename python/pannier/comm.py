"""The process group: what scripts call `deepspeed.comm` for, and the group of its own that each engine gets.

The distributed engine is torch.distributed. Without a group every function here answers as a group of one would.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from pannier.errors import CollectiveError, ConfigError, UsageError
from pannier.rendezvous import interface_to, join

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "engine_group",
    "ensure_group",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_available",
    "is_initialized",
    "told_to_all",
]


_P = ParamSpec("_P")
_R = TypeVar("_R")
_HERE = "here"
_PATIENCE = timedelta(minutes=10)  # How long ranks wait for each other, where nobody says.
_START = timedelta(minutes=5)
_initializations = 0  # Of this process; the same on every rank, since every rank makes the same engines.

# Who started the ranks, by the variables that it sets for rank, number of ranks and rank on this machine. torchrun's come
# first; Slurm sets its own in an interactive allocation too, where nothing was started in parallel.
_STARTERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


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
    """Makes torch's process group, unless there is one: of the ranks that torchrun, Open MPI or Slurm started, or of this
    process alone.

    `rank` and `world_size`, given together, come before the environment. `MASTER_ADDR` and `MASTER_PORT` (or
    `distributed_port`) say where ranks meet, and `timeout` how long for (10 minutes); with one rank nothing is opened. Raises
    CollectiveError for ranks that do not come, and ConfigError for an address that another run uses.
    """
    if dist.is_initialized() or dist_init_required is False:
        _require_initialized(dist_init_required)
        return
    if auto_mpi_discovery:
        _read_starter(distributed_port)
    if world_size < 0:
        world_size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is none of the {world_size} ranks")
    if world_size == 1 and init_method is None:
        # A store inside the process: no port, so two jobs on one machine never meet.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return
    if init_method is None and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but MASTER_ADDR, where the ranks meet, is not set; start them with torchrun"
        )
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    store = None
    if init_method in (None, "env://"):
        if (interface := interface_to(os.environ["MASTER_ADDR"])) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store, init_method = join(rank, world_size, timeout or _PATIENCE), None
    dist.init_process_group(
        dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"),
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def ensure_group(dist_init_required: bool | None = None, timeout_seconds: float = 0.0) -> tuple[int, int]:
    """Rank and number of ranks, of torch's process group or of the environment; the group is made if there are several.

    Ranks then wait for each other longer than `timeout_seconds` where that is short, since they start at different times.
    """
    _require_initialized(dist_init_required)
    if not is_initialized():
        _read_starter(29500)
        if _number("WORLD_SIZE", 1) > 1:
            init_distributed(timeout=max(timedelta(seconds=timeout_seconds), _START))
    return get_rank(), get_world_size()


def engine_group(device: str, timeout_seconds: float) -> Any:
    """A group of all ranks that only one engine uses; None with one rank.

    `device` is where the engine trains. The group's own timeout is above the engine's, whose monitor is to find out first.
    """
    if get_world_size() == 1:
        return None
    _meet(timeout_seconds)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(torch.device(device))
    return dist.new_group(
        timeout=timedelta(seconds=2 * timeout_seconds + 600),
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        device_id=torch.device(device) if on_gpu else None,
    )


def end_engine_group(group: Any) -> None:
    """Lets go of what `engine_group` made: torch keeps its threads and sockets until it is told. One of GPUs stays, since
    ending it may wait for ranks that are gone."""
    if group is not None and dist.is_initialized() and "nccl" not in str(dist.get_backend_config(group)):
        with contextlib.suppress(ValueError):  # All groups were ended before.
            dist.destroy_process_group(group)


def told_to_all(initialize: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has the other ranks, which wait in `engine_group`, learn of an error of this one before it came there."""

    @functools.wraps(initialize)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        global _initializations
        _initializations += 1
        try:
            return initialize(*args, **kwargs)
        except Exception as error:
            if get_world_size() > 1:
                with contextlib.suppress(RuntimeError):  # A store that is gone tells nobody; the error matters more.
                    _store().set(_key(get_rank()), f"{type(error).__name__}: {error}")
            raise

    return run


def _meet(timeout_seconds: float) -> None:
    """Waits until every rank has come as far as this. Raises for one that failed on its way or does not come in time."""
    store = _store()
    store.set(_key(get_rank()), _HERE)
    for rank in range(get_world_size()):
        try:
            store.wait([_key(rank)], timedelta(seconds=timeout_seconds))
        except (RuntimeError, ValueError):
            raise CollectiveError(f"rank {rank} has not come to initialize() within {timeout_seconds:g} s") from None
        if (said := store.get(_key(rank)).decode()) != _HERE:
            raise CollectiveError(f"rank {rank} failed in initialize(): {said}")


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"pannier/initialize/{_initializations}/{rank}"


def _require_initialized(dist_init_required: bool | None) -> None:
    if dist_init_required is False and not is_initialized():
        raise UsageError("dist_init_required is False, but torch's process group is not initialised")


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip() or str(default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}, expected a whole number") from None


def _read_starter(port: int) -> None:
    """Sets torchrun's variables from those of another starter, where torchrun's are not there."""
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return
    for _, rank, size, local_rank in _STARTERS:
        if _number(size, 1) > 1:
            os.environ["RANK"] = str(_number(rank, 0))
            os.environ["WORLD_SIZE"] = str(_number(size, 1))
            os.environ.setdefault("LOCAL_RANK", str(_number(local_rank, 0)))
            os.environ.setdefault("MASTER_PORT", str(port))
            return


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


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Collects every rank's tensor, one after the other. A tensor without dimensions counts as one of one element."""
    flat = tensor.view(1) if tensor.dim() == 0 else tensor
    if is_initialized():
        return dist.all_gather_into_tensor(output_tensor, flat, group, async_op)
    output_tensor.copy_(flat.view_as(output_tensor))
    return None


def destroy_process_group(group: Any = None) -> None:
    """Ends torch's process group."""
    if is_initialized():
        dist.destroy_process_group(group)
