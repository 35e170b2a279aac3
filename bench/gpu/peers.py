"""The peers. Each is imported where it starts, so that one that is missing costs its own rows only."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu.trainer import CLIP, Contestant, Setup, Trainer, engine_config, engine_step, num_ranks, on_disk

_Batch = tuple[torch.Tensor, torch.Tensor]
_CPU = {"device": "cpu", "pin_memory": True}


def contestants() -> dict[str, Contestant]:
    """By name."""
    offload = {"stage": 2, "offload_optimizer": _CPU}
    stage3 = {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU}
    return {
        "torch": Contestant(_start_torch, note="no offload; states in the weights' type"),
        "ds-zero2-none": Contestant(_deepspeed({"stage": 2}), note="no offload"),
        "ds-zero2-offload": Contestant(_deepspeed(offload)),
        "ds-zero3-offload": Contestant(_deepspeed(stage3), model_on_host=True, note="parameters offloaded too"),
        "ds-zero1-none": Contestant(_deepspeed({"stage": 1}), note="no offload"),
        "ds-zero3-none": Contestant(_deepspeed({"stage": 3}), model_on_host=True, note="no offload"),
        "ds-zero1-offload": Contestant(_deepspeed({"stage": 1, "offload_optimizer": _CPU})),
        "ds-zero3-states": Contestant(
            _deepspeed({"stage": 3, "offload_optimizer": _CPU}), model_on_host=True, note="only states"
        ),
        "ds-zero3-nvme": Contestant(_start_deepspeed_on_disk, model_on_host=True, note="states on the disk"),
        "torchao": Contestant(_start_torchao, note="no clipping, bf16 states"),
        "fsdp2": Contestant(
            functools.partial(_start_fsdp2, offload=True),
            model_on_host=True,
            note="parameters offloaded too, bf16 states",
        ),
        "fsdp2-none": Contestant(
            functools.partial(_start_fsdp2, offload=False), model_on_host=True, note="no offload, bf16 states"
        ),
    }


def prepare_deepspeed(disk: bool) -> None:
    """Compiles DeepSpeed's extensions, which it keeps for later processes: a compiler's time is nobody's start-up."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder  # noqa: PLC0415

    CPUAdamBuilder().load()
    if disk:
        AsyncIOBuilder().load()
    if torch.cuda.is_available():
        from deepspeed.ops.op_builder import FusedAdamBuilder  # noqa: PLC0415

        FusedAdamBuilder().load()


def _adamw(setup: Setup) -> dict[str, Any]:
    return {"lr": setup.work.learning_rate, "weight_decay": setup.work.weight_decay, "fused": True}


def _start_torch(model: nn.Module, setup: Setup) -> Trainer:
    if num_ranks() > 1:
        _init_process_group(setup)
        model = nn.parallel.DistributedDataParallel(model, device_ids=None if setup.device.type == "cpu" else [setup.device])
    return _train_with_adamw(model, setup)


def _train_with_adamw(model: nn.Module, setup: Setup) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), **_adamw(setup))
    if setup.work.precision == "fp16":
        return Trainer(_fp16_step(model, optimizer, setup))

    def step(batch: _Batch) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = setup.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return Trainer(step)


def _fp16_step(model: nn.Module, optimizer: torch.optim.Optimizer, setup: Setup) -> Callable[[_Batch], torch.Tensor]:
    # As torch's own pages write fp16: fp32 weights, autocast and a scaler.
    scaler = torch.amp.GradScaler(setup.device.type)

    def step(batch: _Batch) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setup.device.type, torch.float16):
            loss = setup.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def _deepspeed(zero: dict[str, Any]) -> Callable[[nn.Module, Setup], Trainer]:
    return functools.partial(_start_deepspeed, zero=zero)


def _start_deepspeed_on_disk(model: nn.Module, setup: Setup) -> Trainer:
    # The peer's own tuning tool finds about these values on fast disks.
    aio = {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 4, "single_submit": False, "overlap_events": True}
    home = on_disk(setup) | {"pipeline_read": True, "pipeline_write": True}
    return _start_deepspeed(model, setup, zero={"stage": 3, "offload_optimizer": home}, aio=aio)


def _start_deepspeed(
    model: nn.Module, setup: Setup, *, zero: dict[str, Any], aio: dict[str, Any] | None = None
) -> Trainer:
    _be_a_rank()
    import deepspeed  # noqa: PLC0415

    deepspeed.init_distributed()
    config = engine_config(setup, zero) | ({} if aio is None else {"aio": aio})
    if zero["stage"] == 3:
        # Else the whole model is moved to the device before it is partitioned.
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=setup.dtype)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def details() -> dict[str, Any]:
        return {"skipped_steps": engine.skipped_steps, "version": deepspeed.__version__}

    return Trainer(functools.partial(engine_step, engine, setup), details=details, engine=engine)


def _start_torchao(model: nn.Module, setup: Setup) -> Trainer:
    from torchao.optim import CPUOffloadOptimizer  # noqa: PLC0415

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, **_adamw(setup))

    def step(batch: _Batch) -> torch.Tensor:
        # Its gradients leave for the host in backward, so that clipping afterwards would change nothing.
        loss = setup.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step)


def _start_fsdp2(model: nn.Module, setup: Setup, *, offload: bool) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415

    _init_process_group(setup)
    mesh = init_device_mesh(setup.device.type, (num_ranks(),))
    policy = CPUOffloadPolicy(pin_memory=setup.device.type == "cuda") if offload else OffloadPolicy()
    layers = getattr(getattr(model, "model", None), "layers", None) or getattr(model, "blocks", [])
    for layer in layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(setup.device)
    return _train_with_adamw(model, setup)


def _init_process_group(setup: Setup) -> None:
    _be_a_rank()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if setup.device.type == "cuda" else "gloo")


def _be_a_rank() -> None:
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    only = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(only)
