"""What people put into checkpoints, and how they call them, beside a plain resume."""

from __future__ import annotations

import collections
import datetime
import decimal
import fcntl
import fractions
import logging
import os
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import pannier
import ranks
from reference import OPTIMIZERS, config
from test_checkpoints import small_engine, small_step
from test_program import run

VALUES: dict[str, Any] = {
    "moment": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
    "other times": [datetime.date(2020, 1, 2), datetime.time(3, 4), datetime.timedelta(5), datetime.timezone.utc],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1 + 2j, 10**40, float("inf")],
    "sets": [{1, 2}, frozenset([3]), range(4), slice(1, 2)],
    "collections": [collections.Counter("aab"), collections.OrderedDict(a=1), types.SimpleNamespace(a=1)],
    "deques": [collections.deque([1, 2], 5), collections.deque(), {"a": collections.deque([collections.deque("b")])}],
    "dicts that fill themselves": [
        collections.defaultdict(int, a=1),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {1: 2}),
        collections.defaultdict(collections.deque, {"a": collections.deque([1])}),
    ],
    "name": uuid.UUID(int=5),
    "bytes": [b"a", bytearray(b"b")],
    "path": pathlib.Path("a/b"),
    "of torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2])],
    "of numpy": [numpy.float32(2), numpy.int64(3), numpy.datetime64("2020-01-01")],
    "keys": {1: 2, ("a", 1): 3, None: 4},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_client_state_comes_back(tmp_path: pathlib.Path, name: str) -> None:
    engine = small_engine()
    engine.save_checkpoint(tmp_path, client_state={name: VALUES[name]})
    found = engine.load_checkpoint(tmp_path)[1][name]
    assert found == VALUES[name] and type(found) is type(VALUES[name])
    engine.destroy()


def test_arrays_come_back(tmp_path: pathlib.Path) -> None:
    engine = small_engine()
    engine.save_checkpoint(tmp_path, client_state={"words": numpy.array(["ab", "c"]), "state": numpy.random.get_state()})
    found = engine.load_checkpoint(tmp_path)[1]
    assert found["words"].tolist() == ["ab", "c"] and len(found["state"]) == 5
    engine.destroy()


def refused_on_rank_0(rank: int, world: int, folder: str) -> str:
    """A client state that can't be saved; rank 0's is the one that is."""
    engine = small_engine(stage=2)
    with pytest.raises(pannier.ConfigError) as caught:
        engine.save_checkpoint(folder, client_state={"object": (lambda: 1) if rank == 0 else 1})
    engine.save_checkpoint(folder, client_state={"object": 2})  # They still go together.
    assert engine.load_checkpoint(folder)[1] == {"object": 2}
    engine.destroy()
    return str(caught.value)


def test_a_client_state_that_cannot_be_saved_is_told_on_all(tmp_path: pathlib.Path) -> None:
    first, second = (ended.result for ended in ranks.run(__file__, "refused_on_rank_0", 2, str(tmp_path)))
    assert first.startswith("client_state") and "can't be pickled" in first
    assert second.startswith("rank 0: client_state") and "can't be pickled" in second


def test_what_fills_itself_goes_on_doing_so(tmp_path: pathlib.Path) -> None:
    engine = small_engine()
    recent = collections.deque([1, 2], 2)
    engine.save_checkpoint(tmp_path, client_state={"recent": recent, "again": recent, "counts": collections.defaultdict(int)})
    found = engine.load_checkpoint(tmp_path)[1]
    found["recent"].append(3)
    found["counts"]["a"] += 1
    assert found["again"] is found["recent"] and list(found["recent"]) == [2, 3] and found["counts"] == {"a": 1}
    engine.destroy()


@pytest.mark.parametrize("value", [5, [("a", 1)], "text"])
def test_a_client_state_that_is_no_dict_is_refused(tmp_path: pathlib.Path, value: Any) -> None:
    engine = small_engine()
    with pytest.raises(pannier.ConfigError, match="client_state must be a dict, not a"):
        engine.save_checkpoint(tmp_path, client_state=value)
    engine.destroy()


class Loud(torch.nn.Linear):
    """Has a state that can't be had."""

    def get_extra_state(self) -> Any:
        raise RuntimeError("no state today")

    def set_extra_state(self, state: Any) -> None:
        pass


def failing_on_rank_0(rank: int, world: int, folder: str) -> str:
    """Whatever a rank stumbles over before it saves is told to the others, who would wait for it."""
    engine, *_ = pannier.initialize(model=Loud(4, 2), config=config(OPTIMIZERS["AdamW"][0], stage=2))
    text = ranks.error_of(lambda: engine.save_checkpoint(folder))
    engine.destroy()
    return text


def test_errors_before_a_save_are_told_on_all(tmp_path: pathlib.Path) -> None:
    first, second = (ended.result for ended in ranks.run(__file__, "failing_on_rank_0", 2, str(tmp_path)))
    assert first == "RuntimeError: no state today"
    assert second == "UsageError: rank 0: RuntimeError: no state today"


def engine_with(optimizer: str, **more: Any) -> pannier.Engine:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    engine, *_ = pannier.initialize(model=model, config=config(OPTIMIZERS[optimizer][0], stage=2), **more)
    return engine


@pytest.mark.parametrize(
    ("saved", "loaded"), [("AdamW", "Lion"), ("Lion", "AdamW"), ("AdamW", "SGD"), ("Adagrad", "AdamW"), ("Nesterov", "SGD")]
)
def test_states_of_another_optimizer_are_refused_by_name(tmp_path: pathlib.Path, saved: str, loaded: str) -> None:
    engine = engine_with(saved)
    small_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    other = engine_with(loaded)
    small_step(other, 1)
    before = other.module[0].weight.detach().clone()
    names = [{"Nesterov": "SGD"}.get(name, name) for name in (saved, loaded)]
    for strict in (True, False):
        with pytest.raises(pannier.ConfigError, match=rf"the states of {names[0]} \(.*\), and this engine's optimizer is {names[1]} \("):
            other.load_checkpoint(tmp_path, load_module_strict=strict)
        assert torch.equal(other.module[0].weight, before)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert torch.equal(other.module[0].weight, engine.module[0].weight)
    small_step(other, 2)
    other.load_checkpoint(tmp_path, load_module_only=True)
    engine.destroy()
    other.destroy()


def test_adam_goes_on_from_adamw_and_says_so(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    engines = []
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
        optimizer = kind(model.parameters(), weight_decay=0.1)
        engines.append(pannier.initialize(model=model, optimizer=optimizer, config=config(None, stage=2))[0])
    small_step(engines[0], 0)
    engines[0].save_checkpoint(tmp_path)
    engines[1].load_checkpoint(tmp_path)
    assert "was saved by AdamW, and goes on with Adam" in capfd.readouterr().err
    assert not engines[1].optimizer.param_groups[0]["decoupled_weight_decay"]
    small_step(engines[1], 1)
    for engine in engines:
        engine.destroy()


def test_other_parameter_groups_are_told_before_anything_changes(tmp_path: pathlib.Path) -> None:
    engine = engine_with("AdamW")
    engine.save_checkpoint(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    other, *_ = pannier.initialize(
        model=model,
        model_parameters=[{"params": list(part.parameters())} for part in model],
        config=config(OPTIMIZERS["AdamW"][0], stage=2),
    )
    before = model[0].weight.detach().clone()
    with pytest.raises(pannier.ConfigError, match="has 1 parameter groups, and this engine's optimizer 2"):
        other.load_checkpoint(tmp_path)
    assert torch.equal(model[0].weight, before)
    small_step(other, 0)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    engine.destroy()
    other.destroy()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "WarmupLR": lambda optimizer: pannier.lr_schedules.WarmupLR(optimizer, 0.0, 0.1, 4),
    "WarmupCosineLR": lambda optimizer: pannier.lr_schedules.WarmupCosineLR(optimizer, 10, 0.0, 4),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
}


@pytest.mark.parametrize("saved", SCHEDULES)
def test_the_state_of_another_schedule_is_refused_by_name(tmp_path: pathlib.Path, saved: str) -> None:
    engine = engine_with("AdamW", lr_scheduler=SCHEDULES[saved])
    small_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    for loaded, schedule in SCHEDULES.items():
        other = engine_with("AdamW", lr_scheduler=schedule)
        before = other.module[0].weight.detach().clone()
        if saved == loaded or {saved, loaded} <= {"WarmupLR", "WarmupCosineLR"}:  # An iteration is all that these have.
            other.load_checkpoint(tmp_path)
        else:
            with pytest.raises(pannier.ConfigError, match=f"state of a {saved}, and this engine's schedule is a {loaded}"):
                other.load_checkpoint(tmp_path)
            assert torch.equal(other.module[0].weight, before)
            other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        small_step(other, 1)
        other.destroy()


def test_a_schedule_that_has_no_state_to_go_on_from_is_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small_engine()
    engine.save_checkpoint(tmp_path)
    other = engine_with("AdamW", lr_scheduler=SCHEDULES["StepLR"])
    with caplog.at_level(logging.WARNING, logger="pannier"):
        other.load_checkpoint(tmp_path)
    assert "has no state of a schedule: the StepLR starts anew" in caplog.text
    engine.destroy()
    other.destroy()


def test_two_saves_under_one_tag_at_once_are_told(tmp_path: pathlib.Path) -> None:
    engine = small_engine()
    engine.save_checkpoint(tmp_path, tag="one")
    small_step(engine, 0)
    engine.save_checkpoint(tmp_path, tag="two")
    other = os.open(tmp_path / "one", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)  # As a save of another process does.
    with pytest.raises(pannier.IoError, match="another engine or process is saving into '.*/one'"):
        engine.save_checkpoint(tmp_path, tag="one")
    assert run("checkpoint", "prune", tmp_path, "--keep", "1").stdout == ""
    os.close(other)
    engine.save_checkpoint(tmp_path, tag="two")
    assert run("checkpoint", "prune", tmp_path, "--keep", "1").stdout == "removed one\n"
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "two")
    engine.destroy()


@pytest.mark.parametrize("tag", ["epoch=1-step=20", "loss:0.25", "a+b,c@(d)[e]~%", 7])
def test_tags_as_people_write_them(tmp_path: pathlib.Path, tag: Any) -> None:
    engine = small_engine()
    engine.save_checkpoint(tmp_path, tag=tag)
    assert engine.load_checkpoint(tmp_path)[0] == engine.load_checkpoint(tmp_path, tag=tag)[0] == str(tmp_path / str(tag))
    assert str(tag) in run("checkpoint", "list", tmp_path).stdout
    engine.destroy()


def test_latest_is_no_tag(tmp_path: pathlib.Path) -> None:
    engine = small_engine()
    with pytest.raises(pannier.ConfigError, match="'latest' is no tag"):
        engine.save_checkpoint(tmp_path, tag="latest")
    assert list(tmp_path.iterdir()) == []
    engine.destroy()


def test_the_folder_of_a_tag_is_not_the_folder(tmp_path: pathlib.Path) -> None:
    engine = small_engine()
    engine.save_checkpoint(tmp_path, tag="one")
    with pytest.raises(pannier.ConfigError, match="is a checkpoint itself: .* tag='one'"):
        engine.load_checkpoint(tmp_path / "one")
    with pytest.raises(pannier.ConfigError, match="needs a folder to load from"):
        engine.load_checkpoint(None)
    engine.destroy()


def test_loads_and_saves_under_inference_mode(tmp_path: pathlib.Path) -> None:
    engine = small_engine(stage=2, offload=True)
    small_step(engine, 0)
    with torch.inference_mode():
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    small_step(engine, 1)
    engine.destroy()


if __name__ == "__main__":
    ranks.main({"refused_on_rank_0": refused_on_rank_0, "failing_on_rank_0": failing_on_rank_0})
