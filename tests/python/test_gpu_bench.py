"""`bench/gpu_table.py` with a tiny model on the CPU: every contestant gives a row, whatever happens to it."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

BENCH = pathlib.Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import gpu_table  # noqa: E402
from gpu import largest, tables, works  # noqa: E402
from gpu.attempts import Limits, attempt  # noqa: E402

TINY = ["--steps", "10", "--warm-up", "5", "--device", "cpu", "--tiny"]


def contestant(who: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Runs a contestant by hand; its status and the last line it printed."""
    command = [sys.executable, BENCH / "gpu" / "contestant.py", "--who", who, *TINY, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=300)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("who", ["torch", "pannier-none", "pannier"])
def test_contestant_prints_one_line_with_every_figure(who: str) -> None:
    status, row = contestant(who)
    assert status == 0, row
    assert (row["who"], row["work"], row["tokens"], row["steps"]) == (who, "tiny", 32, 10)
    assert len(row["seconds_each"]) == 10
    least, most = row["seconds_spread"]
    assert 0 < least <= row["seconds"] <= most
    assert row["seconds_mean"] > 0
    assert row["parameters"] == 64 * 16 + 6 * 16 * 16 + 6 * 16 + 64 * 17
    assert row["last_loss"] < row["first_loss"]
    assert row["start_up_seconds"] > 0
    assert row["host_peak_rss_gib"] >= row["host_rss_gib"] > 0
    assert row["host_pss_gib"] > 0
    assert "host_used_gib" in row
    for name in ("peak", "reserved", "run_peak", "run_reserved", "used"):
        assert row[f"device_{name}_gib"] is None, "torch counts no peaks on a CPU"


def test_contestants_start_from_the_same_weights_and_data() -> None:
    first = {contestant(who, "--steps", "1")[1]["first_loss"] for who in ("torch", "pannier")}
    assert len(first) == 1


def test_contestant_that_fails_says_why() -> None:
    status, row = contestant("nobody")
    assert status == 1
    assert "no contestant is called 'nobody'" in row["reason"]


def test_table_goes_on_after_a_contestant_that_fails(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    who = "torch,nobody,pannier-slack,pannier"
    assert gpu_table.main(["--device", "cpu", "--tiny", "--who", who, "--out", str(out)]) == 0
    rows = {row["who"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == who.split(",")
    assert "no contestant is called" in rows["nobody"]["reason"]
    assert rows["nobody"]["phase"] == "importing torch"
    assert "needs the peak of pannier" in rows["pannier-slack"]["reason"]
    assert rows["pannier"]["share_of_no_offload"] > 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 4
    assert len({line.count("|") for line in table}) == 1, "every row has every column"
    assert "100 %" in table[2]


def test_budget_reaches_the_engine_and_one_too_small_is_its_reason() -> None:
    _, row = contestant("pannier", "--device-memory-gib", "1")
    assert row["device_memory_nbytes"] == 1024**3
    status, row = contestant("pannier", "--device-memory-gib", "0.0000001")
    assert status == 1
    assert row["reason"].startswith(("ConfigError", "OutOfMemoryError"))


def test_states_on_a_disk_and_checkpoints(tmp_path: pathlib.Path) -> None:
    folders = ["--disk", str(tmp_path), "--checkpoints", str(tmp_path)]
    status, row = contestant("pannier-zero3-nvme", *folders)
    assert status == 0, row
    assert row["checkpoint_nbytes"] > 12 * row["parameters"]
    assert row["save_seconds"] > 0
    assert row["load_seconds"] > 0
    assert "save" in tables.markdown([row])
    assert list(tmp_path.iterdir()) == [], "nothing stays"
    status, row = contestant("pannier-nvme")
    assert status == 1
    assert "need a folder" in row["reason"]
    status, row = contestant("torch", *folders)
    assert "only engines" in row["reason"]


def test_attempt_that_takes_too_long_is_ended() -> None:
    row = attempt("torch", "tiny", TINY, Limits(timeout_seconds=0.2))
    assert row["reason"].startswith("timed out after 0 s, in: ")
    assert row["attempt_seconds"] < 60


def test_attempt_that_takes_too_much_host_memory_is_ended() -> None:
    row = attempt("torch", "tiny", TINY, Limits(host_gib=0.001))
    assert row["reason"].startswith("host memory: ")


def test_attempt_after_the_deadline_is_not_run() -> None:
    row = attempt("torch", "tiny", TINY, Limits(deadline=0.0))
    assert row == {"who": "torch", "work": "tiny", "reason": "not run: the time for the whole comparison was over"}


def test_budget_of_a_peer_is_its_peak_on_the_same_work() -> None:
    rows: list[tables.Row] = [
        {"who": "ds-zero2-offload", "work": "1.5b-8k", "device_peak_gib": 18.0},
        {"who": "pannier", "work": "1.5b-8k", "device_peak_gib": 17.0},
    ]
    assert gpu_table.budget_gib("pannier", "1.5b-8k", "peer", rows) == 18.0
    assert gpu_table.budget_gib("pannier", "1.5b-8k", "20", rows) == 20.0
    assert gpu_table.budget_gib("pannier", "1.5b-8k", None, rows) is None
    assert gpu_table.budget_gib("pannier-none", "1.5b-8k", "peer", rows) is None
    assert gpu_table.budget_gib("pannier-slack", "1.5b-8k", "peer", rows) == 25.0
    with pytest.raises(gpu_table.MissingError):
        gpu_table.budget_gib("pannier", "1.5b-16k", "peer", rows)


def test_works_have_the_shapes_their_names_say() -> None:
    work = works.parse("zero3-1.5b-16k")
    assert (work.batch, work.sequence, work.tokens) == (8, 2048, 16384)
    assert work.offloads_parameters
    assert work.shape == works.SHAPES["1.5b"]
    shape = works.parse("7b-30l-4k").shape
    assert shape is not None
    assert (shape.layers, shape.hidden, shape.tied) == (30, 3584, False)
    for name in ("9b-16k", "1.5b", "1.5b-1k", ""):
        with pytest.raises(ValueError, match=r"no work is called|tokens or more"):
            works.parse(name)


def test_search_finds_the_largest_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt_up_to_30(who: str, work: str, _options: list[str], _limits: Limits) -> tables.Row:
        shape = works.parse(work).shape
        assert shape is not None
        if shape.layers > 30:
            return {"who": who, "work": work, "reason": "OutOfMemoryError"}
        figures = {"parameters": shape.layers, "seconds": 1.0, "device_run_peak_gib": 23.0, "host_used_gib": 100.0}
        return {"who": who, "work": work, **figures}

    monkeypatch.setattr(largest, "attempt", attempt_up_to_30)
    rows: list[tables.Row] = []
    found = largest.search("pannier", [8, 16, 24, 28, 30, 32, 40], [], Limits(), rows)
    assert (found["layers"], found["least_that_failed"], found["complete"]) == (30, 32, True)
    assert len(rows) == 3, "a bisection tries few"
    assert "| pannier | 30 |" in largest.markdown([found])
