"""A run that is cut in two is the run that is not: weights, moments, counters, rates and loss scale."""

from __future__ import annotations

import logging
import math
import pathlib
from typing import Any

import pytest
import torch

import pannier
import ranks
from case_models import cfg, start

CELLS = [(0, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (2, "nvme"), (3, "none"), (3, "cpu"), (3, "nvme"), (3, "param")]
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}},
}
CLIENT = {"mine": [1, "two"], "global_steps": "my own", "optimizer": None, "lr_scheduler": 3.5}  # Names of the engine's too.


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype)).float().pow(2).mean()


def engine_of(stage: int, home: str, dtype: str) -> pannier.Engine:
    zero: dict[str, Any] = {"offload_param": {"device": "cpu"}} if home == "param" else {}
    dev = "cpu" if home == "param" else home
    schedule = {"warmup_type": "linear", "warmup_num_steps": 2, "total_num_steps": 6, "warmup_max_lr": 0.1}
    return start(
        Net(),
        cfg(stage=stage, dev=dev, gas=2, zero=zero, scheduler={"type": "WarmupDecayLR", "params": schedule}, **PRECISION[dtype]),
    )


def steps(engine: pannier.Engine, first: int, last: int, dtype: str) -> list[float]:
    rates = []
    for number in range(first, last):
        rates.append(engine.get_lr()[0])
        for micro in range(2):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + micro))
            loss = engine(x)
            engine.backward(loss * math.inf if dtype == "fp16" and number == 1 else loss)
            engine.step()
    return rates


def state(engine: pannier.Engine) -> dict[str, Any]:
    tensors = {}
    for name, param in engine.module.named_parameters():
        tensors[name] = pannier.safe_get_full_fp32_param(param).flatten().tolist()
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name} {key}"] = pannier.safe_get_full_optimizer_state(param, key).flatten().tolist()
        tensors[f"{name} step"] = engine.optimizer.state[param]["step"]
    counters = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.optimizer.cur_scale]
    return {"tensors": tensors, "counters": counters, "scaler": engine.optimizer.state_dict()["loss_scaler"]}


def stored(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    file = pannier.core.open_checkpoint(folder, "")
    return {name: pannier.core.call(file.read, name) for name in pannier.core.call(file.names)}


def whole(rank: int, world: int, folder: str, dtype: str) -> Any:
    found = {}
    for stage, home in CELLS:
        torch.manual_seed(5)
        engine = engine_of(stage, home, dtype)
        rates = steps(engine, 0, 3, dtype)
        engine.save_checkpoint(f"{folder}/{stage}{home}", client_state={"rng": torch.get_rng_state(), **CLIENT})
        found[f"{stage}{home}"] = {"rates": rates + steps(engine, 3, 6, dtype), **state(engine)}
        engine.destroy()
    return found


def resumed(rank: int, world: int, folder: str, dtype: str) -> Any:
    found = {}
    for stage, home in CELLS:
        engine = engine_of(stage, home, dtype)
        engine.load_checkpoint(f"{folder}/{stage}{home}")
        _, client = engine.load_checkpoint(f"{folder}/{stage}{home}")  # Twice.
        engine.save_checkpoint(f"{folder}/again{stage}{home}", client_state=client)
        engine.load_checkpoint(f"{folder}/again{stage}{home}")
        assert {key: client[key] for key in CLIENT} == CLIENT and client.keys() == {"rng", *CLIENT}
        first, again = (stored(f"{folder}/{name}{stage}{home}") for name in ("", "again"))
        assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
        torch.set_rng_state(client["rng"])
        rates = steps(engine, 3, 6, dtype)
        found[f"{stage}{home}"] = {"rates": rates, **state(engine)}
        engine.destroy()
    return found


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_the_same_run(dtype: str, world: int, tmp_path: pathlib.Path) -> None:
    wholes = [ended.result for ended in ranks.run(__file__, "whole", world, str(tmp_path), dtype)]
    resumes = [ended.result for ended in ranks.run(__file__, "resumed", world, str(tmp_path), dtype)]
    for complete, cut in zip(wholes, resumes, strict=True):
        for cell, row in complete.items():
            assert cut[cell]["rates"] == row["rates"][3:], cell
            assert {**cut[cell], "rates": 0} == {**row, "rates": 0}, cell
            skips = int(dtype == "fp16")
            assert row["counters"][:3] == [6, 12, skips]
            assert {value for name, value in row["tensors"].items() if name.endswith("step")} == {6 - skips}
            if not skips:
                assert row["rates"][3:] == pytest.approx([0.1, 0.075, 0.05])


def test_a_checkpoint_from_before_any_step(tmp_path: pathlib.Path) -> None:
    for dtype in PRECISION:
        for stage, home in CELLS:
            folder = tmp_path / f"{dtype}{stage}{home}"
            first = engine_of(stage, home, dtype)
            first.save_checkpoint(folder)
            torch.manual_seed(5)
            steps(first, 0, 2, dtype)
            want = state(first)
            first.destroy()
            second = engine_of(stage, home, dtype)
            torch.manual_seed(9)
            steps(second, 3, 4, dtype)
            second.load_checkpoint(folder)
            assert (second.global_steps, second.micro_steps) == (0, 0)
            torch.manual_seed(5)
            steps(second, 0, 2, dtype)
            assert state(second) == want, (dtype, stage, home)
            second.destroy()


def test_the_saved_rate_comes_before_the_configurations(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    def with_lr(lr: float) -> pannier.Engine:
        return start(Net(), cfg(opt={"type": "AdamW", "params": {"lr": lr}}))

    saved = with_lr(0.25)
    saved.save_checkpoint(tmp_path)
    other = with_lr(0.5)
    with caplog.at_level(logging.WARNING, logger="pannier"):
        other.load_checkpoint(tmp_path)
    assert other.get_lr() == [0.25]
    said = [record.getMessage() for record in caplog.records if "lr" in record.getMessage()]
    assert len(said) == 1 and "0.25" in said[0] and "0.5" in said[0], said


if __name__ == "__main__":
    ranks.main({"whole": whole, "resumed": resumed})
