"""Relatives of the cases about configurations: where they come from, what stands in them, what they leave open."""

from __future__ import annotations

import base64
import collections
import enum
import importlib.machinery
import json
import logging
import math
import pathlib
import sys
import types
from typing import Any

import numpy
import pytest
import torch

import pannier
from case_models import OPT1, Dot, cfg, run, start, weight

MARK = "\ufeff"  # What some editors begin a file with.


def trained(config: Any) -> list[float]:
    engine = start(Dot(), config)
    run(engine, [[4.0]])
    result = weight(engine)
    engine.destroy()
    return result


def written(path: pathlib.Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("how", ["marked file", "text", "indented text", "commented text", "base64", "marked base64"])
def test_configuration_as_text(how: str, tmp_path: pathlib.Path) -> None:
    text = json.dumps(cfg(), indent=1 if how == "indented text" else None)
    given = {
        "marked file": lambda: written(tmp_path / "ds.json", MARK + text),
        "text": lambda: text,
        "indented text": lambda: "\n " + text,
        "commented text": lambda: "// mine\n" + text,
        "base64": lambda: base64.b64encode(text.encode()).decode(),
        "marked base64": lambda: base64.b64encode((MARK + text).encode()).decode(),
    }[how]()
    assert trained(given) == pytest.approx([-0.8], abs=1e-6)


def test_marked_file_with_what_the_caller_brings(tmp_path: pathlib.Path) -> None:
    sections = {"optimizer": {"type": "Own"}, "scheduler": {"type": "StepLR", "params": {"step_size": 1}}}
    model = Dot()
    engine = start(
        model,
        written(tmp_path / "ds.json", MARK + json.dumps(cfg(**{"opt": None}) | sections)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.5),
    )
    assert engine.get_lr() == [0.5] and isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.StepLR)


def test_text_that_is_neither_says_so() -> None:
    with pytest.raises(pannier.ConfigError, match="not JSON"):
        start(Dot(), '{"zero_optimization": ')
    with pytest.raises(pannier.ConfigError, match="neither a file that exists nor JSON"):
        start(Dot(), "no/such/file.json")


@pytest.mark.parametrize("has_hjson", [False, True])
def test_file_that_is_empty_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, has_hjson: bool) -> None:
    hjson = types.ModuleType("hjson")
    hjson.loads = lambda text: {}  # type: ignore[attr-defined]
    hjson.__spec__ = importlib.machinery.ModuleSpec("hjson", None)
    monkeypatch.setitem(sys.modules, "hjson", hjson if has_hjson else None)
    with pytest.raises(pannier.ConfigError, match="ds.json.*the text is empty"):
        start(Dot(), written(tmp_path / "ds.json", " \n"))


class Foreign(collections.abc.Sequence):  # type: ignore[type-arg]
    """A list as configuration libraries have it, which is not Python's."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]


class Device(enum.Enum):
    CPU = "cpu"


@pytest.mark.parametrize(
    "betas",
    [(0.5, 0.75), Foreign(0.5, 0.75), collections.deque([0.5, 0.75]), numpy.array([0.5, 0.75]), torch.tensor([0.5, 0.75])],
)
def test_lists_of_every_kind(betas: Any) -> None:
    optimizer = types.MappingProxyType({"type": "AdamW", "params": collections.OrderedDict(lr=1.0, eps=1.0, betas=betas)})
    config = cfg(dev="none", opt=optimizer)
    config["zero_optimization"]["offload_optimizer"] = {"device": Device.CPU}
    engine = start(Dot(), config)
    assert engine.optimizer.param_groups[0]["betas"] == (0.5, 0.75) and engine.zero_cpu_offload()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"betas": [[0.9, 0.999]]}, r"betas: wanted two numbers"),
        ({"betas": [0.9, 0.99, 0.9]}, r"betas: wanted two numbers"),
        ({"betas": ["auto", 0.999]}, r"betas: wanted two numbers"),
        ({"betas": [0.9, 1.0]}, r"betas: wanted two numbers"),
        ({"betas": 0.9}, r"betas: wanted two numbers"),
        ({"betas": {0.9, 0.999}}, r"params\.betas is of type set"),
        ({"lr": [0.1]}, r"params\.lr: wanted a number"),
        ({"lr": True}, r"params\.lr: wanted a number"),
        ({"lr": -1}, r"params\.lr: wanted a number of at least 0"),
        ({"lr": math.inf}, r"params\.lr: wanted a number.*Infinity"),
        ({"eps": -1}, r"params\.eps: wanted a number of at least 0"),
        ({"weight_decay": "0.1"}, r"params\.weight_decay: wanted a number"),
        ({"bias_correction": "true"}, r"params\.bias_correction: wanted true or false"),
        ({"beta1": 0.9}, r"params\.beta1: unknown key; did you mean .*betas"),
        ({"adamw_mode": True}, r"params\.adamw_mode: unknown key; did you mean .*adam_w_mode"),
        ({"max_grad_norm": 1.0}, r"params\.max_grad_norm: unknown key; did you mean gradient_clipping"),
    ],
)
def test_optimizer_values_that_cannot_be(params: dict[str, Any], message: str) -> None:
    with pytest.raises(pannier.ConfigError, match=message):
        start(Dot(), cfg(opt={"type": "AdamW", "params": {**OPT1["params"], **params}}))


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (("auto", 2, 4), (8, 2, 4)),
        ((8, "auto", 2), (8, 4, 2)),
        ((8, 2, "auto"), (8, 2, 4)),
        (("auto", 2, "auto"), (2, 2, 1)),
        ((8.0, 2.0, None), (8, 2, 4)),
    ],
)
def test_auto_batch_sizes_follow_from_the_others(given: tuple[Any, ...], want: tuple[int, ...]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    assert start(Dot(), {**sizes, "optimizer": OPT1}).get_batch_info() == want


@pytest.mark.parametrize("sizes", [("auto", "auto", 4), (20, "auto", "auto"), ("auto", "auto", "auto")])
def test_auto_sizes_of_the_first_batch(sizes: tuple[Any, ...]) -> None:
    train, micro, gas = sizes
    engine = start(
        Dot(),
        {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": gas,
            "optimizer": OPT1,
        },
    )
    run(engine, [[1.0] * 5])
    steps = 1 if sizes == ("auto", "auto", "auto") else 4
    assert engine.get_batch_info() == (5 * steps, 5, steps) and engine.global_steps == (steps == 1)


def test_infinite_clipping_is_none() -> None:
    for clip in (0, math.inf):
        engine = start(Dot(), cfg(gradient_clipping=clip))
        run(engine, [[4.0]])
        assert weight(engine) == pytest.approx([-0.8], abs=1e-6) and engine.gradient_clipping() == 0
        assert engine.get_global_grad_norm() == 4.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loss_scale": -1}, "loss_scale: wanted a number of at least 0"),
        ({"loss_scale": "dynamic"}, "loss_scale: wanted a number"),
        ({"loss_scale": 1e39}, "loss_scale must be 0 .* or a positive number"),
        ({"initial_scale_power": 200}, "initial_scale_power: wanted a whole number from 0 to 100"),
        ({"loss_scale_window": 0}, "loss_scale_window must be positive"),
        ({"hysteresis": 0}, "hysteresis must be positive"),
        ({"min_loss_scale": 0}, "min_loss_scale must be positive"),
        ({"min_loss_scale": 64, "initial_scale_power": 4}, "min_loss_scale 64 is above the scale at the start"),
    ],
)
def test_loss_scales_that_cannot_be(section: dict[str, Any], message: str) -> None:
    with pytest.raises(pannier.ConfigError, match=message):
        start(Dot(), cfg(fp16={"enabled": True, **section}))


def test_schedules_left_open_or_too_short(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(pannier.ConfigError, match=r'scheduler\.params\.T_max: still "auto", and CosineAnnealingLR'):
        start(Dot(), cfg(scheduler={"type": "CosineAnnealingLR", "params": {"T_max": "auto"}}))
    short = {"total_num_steps": 3, "warmup_num_steps": 5, "warmup_type": "linear"}
    with caplog.at_level(logging.WARNING, logger="pannier"):
        engine = start(Dot(), cfg(scheduler={"type": "WarmupDecayLR", "params": short}))
    assert "total_num_steps 3 is less than warmup_num_steps 5" in caplog.text
    run(engine, [[1.0]] * 6)
    assert engine.get_lr() == [0.0]
