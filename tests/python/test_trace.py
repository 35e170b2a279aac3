"""pannier.trace: one step as a file that a person can look at."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import pannier

ROOT = pathlib.Path(__file__).parents[2]


def train(path: pathlib.Path, steps: int = 4, overflow_at: int = -1, **keys: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
    engine, _, _, _ = pannier.initialize(
        model=model,
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1024, "offload_optimizer": {"device": "cpu"}},
            "bf16": {"enabled": True},
            "pannier": ({"trace": str(path)} if path.name else {}) | keys,
        },
    )
    for step in range(steps):
        loss = engine(torch.ones(2, 32, dtype=torch.bfloat16)).float().mean()
        engine.backward(loss * (float("inf") if step == overflow_at else 1.0))
        engine.step()
    engine.synchronize()
    weights = [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    return weights


def rows(path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    result: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            result[names[event["tid"]]].append(event)
    return result


def names(events: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in events}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_one_step_has_its_phases_units_updates_and_transfers(tmp_path: pathlib.Path, share: float, overlap: bool) -> None:
    path = tmp_path / "step.json"
    train(path, trace_step=3, streamed_share=share, overlap_step=overlap)
    drawn = rows(path)
    assert {"forward", "backward", "step", "wait for the decision"} <= names(drawn["caller"])
    assert {"forward", "backward", "unit 1", "unit 2", "unit 3"} <= names(drawn["device compute"])
    updates = names(drawn["host updates"]) | {name for name in names(drawn["device compute"]) if "update" in name}
    every = {f"update {bucket}" for bucket in range(6)}  # A weight is a bucket, and so is a bias.
    # Updates that overlap run outside of step(), and these may end before the next is traced.
    assert updates <= every if overlap else updates == every
    assert any("states" in name for name in names(drawn["to the device"])) == (share > 0)
    assert any("gradients" in name for name in names(drawn["to the host"])) == (share < 1)
    for events in drawn.values():
        for event in events:
            assert event["ts"] >= 0 and event["dur"] >= 0
    for event in drawn["to the device"] + drawn["to the host"]:
        assert event["args"]["bytes"] > 0 and event["args"]["GB/s"] > 0


def test_without_an_index_it_is_the_tenth_step(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "step.json"
    train(path, steps=9)
    assert path.read_text() == ""
    train(path, steps=11)
    title = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "process_name"]
    assert title[0]["args"]["name"] == "step 10 on metered CPU"


def test_the_first_step_can_be_traced(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "step.json", steps=1, trace_step=1)
    assert "forward" in names(rows(tmp_path / "step.json")["caller"])


def test_a_skipped_step_is_traced_too(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "step.json", overflow_at=1, trace_step=2)
    assert "step" in names(rows(tmp_path / "step.json")["caller"])


def test_a_trace_changes_no_bits(tmp_path: pathlib.Path) -> None:
    with_trace = train(tmp_path / "step.json", trace_step=2)
    without = train(pathlib.Path(""))
    assert all(torch.equal(left, right) for left, right in zip(with_trace, without, strict=True))


def test_a_run_that_ends_before_says_so(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "step.json", steps=2, trace_step=7)
    assert "training ended before step 7" in capfd.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: pathlib.Path) -> None:
    with pytest.raises(pannier.ConfigError, match=r"pannier\.trace: '.*nowhere/step\.json' can't be written: No such file"):
        train(tmp_path / "nowhere" / "step.json")


def test_step_zero_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(pannier.ConfigError, match=r"pannier\.trace_step"):
        train(tmp_path / "step.json", trace_step=0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_does_not_end_the_training(capfd: pytest.CaptureFixture[str]) -> None:
    train(pathlib.Path("/dev/full"), trace_step=2)
    assert "'/dev/full' could not be written: No space left" in capfd.readouterr().err


def test_the_picture_is_drawn(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "step.json", trace_step=3, streamed_share=0.5)
    subprocess.run(
        [sys.executable, ROOT / "scripts/plot_trace.py", tmp_path / "step.json", "--out", tmp_path / "step.png"], check=True
    )
    assert (tmp_path / "step.png").stat().st_size > 10_000
