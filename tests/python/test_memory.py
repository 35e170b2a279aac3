"""What training holds: measured by the allocator and the kernel, beside the plan."""

from __future__ import annotations

import gc
import json
import pathlib
import re
from typing import Any

import pytest
import torch

import pannier

WIDTH = 640


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def count(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def config(home: str, dtype: str, steps: int = 1, **pannier_keys: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * steps,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": home}},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        "pannier": pannier_keys,
    }


def train(home: str, dtype: str, steps: int = 1, updates: int = 3) -> tuple[pannier.Engine, dict[str, Any]]:
    gc.collect()  # The meter counts the whole process: models of earlier tests must be gone.
    engine, _, _, _ = pannier.initialize(model=make_model(), config=config(home, dtype, steps))
    engine.reset_peak_memory()
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for _ in range(steps * updates):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=dtypes[dtype])).float().mean())
        engine.step()
    return engine, engine.memory_stats()


def mappings() -> dict[int, int]:
    """Anonymous mappings of this process: bytes of address space to bytes resident."""
    sizes: dict[int, int] = {}
    size = 0
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"Size:\s+(\d+) kB", line):
            size = int(found[1]) * 1024
        elif found := re.match(r"Rss:\s+(\d+) kB", line):
            sizes[size] = int(found[1]) * 1024
    return sizes


@pytest.mark.parametrize(("dtype", "states", "gradient"), [("bf16", 12, 2), ("fp16", 14, 2), ("fp32", 12, 4)])
def test_host_holds_the_bytes_of_the_format(dtype: str, states: int, gradient: int) -> None:
    engine, stats = train("cpu", dtype)
    params = count(engine.module)
    slack = 2**20
    by_owner = stats["host"]["by_owner"]
    for owner, width in (("optimizer states", states), ("gradients", gradient)):
        current = by_owner[owner]["current"]
        assert width * params <= current <= width * params * 1.01 + slack
        assert mappings()[current] == current, "the kernel counts the slab otherwise than the account"
    engine.destroy()


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_device_peak_falls_by_the_states(dtype: str) -> None:
    peaks = {}
    for home in ("none", "cpu"):
        engine, stats = train(home, dtype)
        peaks[home] = stats["device"]["peak"]
        if home == "none":
            states = stats["device"]["by_owner"]["optimizer states"]["peak"]
        engine.destroy()
        del engine
    assert peaks["none"] - peaks["cpu"] >= 0.95 * states


@pytest.mark.parametrize("home", ["none", "cpu"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("steps", [1, 4])
def test_measured_is_what_was_planned(home: str, dtype: str, steps: int) -> None:
    engine, stats = train(home, dtype, steps)
    plan = engine.plan()
    for tier in ("device", "host"):
        for owner, usage in stats[tier]["by_owner"].items():
            if owner == "streamed states":
                assert usage["peak"] == 0
            elif owner != "activations":
                planned = plan[tier][owner]
                assert abs(usage["peak"] - planned) <= 0.03 * planned, (tier, owner, usage, planned)
    engine.destroy()


def test_everything_is_given_back() -> None:
    torch.ops.pannier.reset_device_peak()
    engine, _ = train("cpu", "bf16")
    engine.destroy()
    assert engine.module is not None
    with pytest.raises(pannier.ConfigError, match="destroyed"):
        engine.step()


def test_cap_between_the_peaks_trains_only_with_offload() -> None:
    model = make_model()
    start = json.loads(torch.ops.pannier.device_memory())["current"]
    cap = start + 8 * count(model)
    with pytest.raises(pannier.OutOfMemoryError, match=r" out of memory\. .*nothing was allocated.*\"cpu\" would need"):
        pannier.initialize(model=model, config=config("none", "bf16", device_memory=cap))
    engine, _, _, _ = pannier.initialize(model=model, config=config("cpu", "bf16", device_memory=cap))
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().mean())
    engine.step()
    assert engine.memory_stats()["device"]["cap"] == cap
    engine.destroy()
    torch.ones(10 * count(model))  # The cap ends with its engine.


def test_a_step_over_the_cap_names_owner_and_sizes_and_can_be_tried_again() -> None:
    model = make_model()
    start = json.loads(torch.ops.pannier.device_memory())["current"]
    engine, _, _, _ = pannier.initialize(model=model, config=config("cpu", "bf16", device_memory=start + 8 * count(model)))
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(pannier.OutOfMemoryError, match=r"CPU out of memory\. Tried to allocate .* for activations"):
        engine.backward(engine(torch.ones(2**16, WIDTH, dtype=torch.bfloat16)).float().mean())
    assert all(map(torch.equal, before, model.parameters()))
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().mean())
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_the_config_starts_the_memory_timeline() -> None:
    engine = pannier.initialize(model=make_model(), config=config("none", "fp32", memory_timeline=True))[0]
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    engine.step()
    samples = engine.memory_timeline()
    assert len(samples) > 1 and samples[0][0] == 0
    assert pannier.initialize(model=make_model(), config=config("none", "fp32"))[0].memory_timeline() == []
