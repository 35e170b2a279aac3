"""Host memory grows by the bytes of the format, not with steps nor engines; what does not fit is refused with numbers."""

from __future__ import annotations

import ctypes
import gc
import json
import pathlib
import resource
from typing import Any

import pytest
import torch

import pannier
import ranks
from case_models import OPT1

WIDTH, LAYERS = 1600, 8
NUMEL = LAYERS * (WIDTH + 1) * WIDTH
MIB = 2**20


def rss() -> int:
    # What malloc keeps for reuse comes and goes by megabytes: it is given back first.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def build(dtype: str, **ours: Any) -> pannier.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    if dtype == "bf16":
        model = model.bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": OPT1,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "pannier": ours,
    }
    return pannier.initialize(model=model, config=config)[0]


def step(engine: pannier.Engine) -> None:
    engine.backward(engine(torch.ones(1, WIDTH, dtype=engine.module[0].weight.dtype)).sum())
    engine.step()


def growth(rank: int, world: int, dtype: str) -> dict[str, Any]:
    plain = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    del plain
    gc.collect()
    before = rss()
    engine = build(dtype)
    step(engine)
    first = rss()
    for _ in range(19):
        step(engine)
    last = rss()
    stats = engine.memory_stats()
    host, device = stats["host"]["current"], stats["device"]["peak"]
    engine.destroy()
    del engine
    cycles = []
    for _ in range(10):
        engine = build(dtype)
        step(engine)
        engine.destroy()
        del engine
        gc.collect()
        cycles.append(rss())
    return {"host": host / NUMEL, "beyond": last - before - host - device, "steps": (last - first) / first, "cycles": cycles}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_is_that_of_the_format_and_stays(dtype: str) -> None:
    (ended,) = ranks.run(__file__, "growth", 1, dtype)
    result = ended.result
    # 12 of states and the gradient. The device is host memory too here; beyond both there are torch's own threads.
    assert result["host"] <= 18, result
    assert result["beyond"] <= 256 * MIB, result
    assert abs(result["steps"]) <= 0.01, result
    # The least of some, since threads that end late hold their stacks and arenas a while.
    assert min(result["cycles"][6:]) - min(result["cycles"][2:6]) <= 10 * MIB, result


def peak() -> int:
    """The most that this process has held since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def saves(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Ten saves and a load: what they take beyond what training takes, and what they leave."""
    engine = build("bf16")
    step(engine)
    steady, left, most = rss(), [], []
    for _ in range(10):
        forget_peak()
        engine.save_checkpoint(folder, tag="one")
        most.append(peak())
        gc.collect()
        left.append(rss())
    forget_peak()
    engine.load_checkpoint(folder)
    most.append(peak())
    step(engine)
    return {"steady": steady, "left": left, "most": max(most)}


@pytest.mark.parametrize("world", [1, 2])
def test_saves_and_loads_take_little_and_leave_nothing(world: int, tmp_path: pathlib.Path) -> None:
    for ended in ranks.run(__file__, "saves", world, str(tmp_path)):
        result, shard = ended.result, 12 * NUMEL // world
        assert result["most"] <= result["steady"] + shard + 64 * MIB, result
        # The least of some, as above.
        assert min(result["left"][6:]) - min(result["left"][2:6]) <= 10 * MIB, result


def shares(rank: int, world: int) -> int:
    engine = build("bf16")
    step(engine)
    return engine.memory_stats()["host"]["by_owner"]["optimizer states"]["current"]


def test_ranks_share_the_states() -> None:
    total = sum(ended.result for ended in ranks.run(__file__, "shares", 2))
    assert total <= 12.1 * NUMEL


def held_on_device() -> int:
    gc.collect()
    held = json.loads(pannier.core.call(torch.ops.pannier.device_memory))["current"]
    assert isinstance(held, int)
    return held


def test_what_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    before = held_on_device()
    with pytest.raises(pannier.OutOfMemoryError) as error:
        build("bf16", host_memory=NUMEL * 6)
    message = str(error.value)
    assert "host" in message and "MiB" in message, message
    del error
    assert held_on_device() == before


if __name__ == "__main__":
    ranks.main({"growth": growth, "saves": saves, "shares": shares})
