"""Random mutations of valid configurations: each trains a step, or is a ConfigError that names a key; nothing else."""

from __future__ import annotations

import copy
import json
import logging
import pathlib
import random
import re
from typing import Any

import pytest
import torch

import pannier

COUNT = 10_000
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-8, 5e8, 1e12, 2**31, 2**63, 10**30, float("inf"), "", "auto", "none",
    "cpu", "true", "false", "1", "3e-4", "fp32", "bf16", "AdamW", "Adam", "SGD", "Lion", "WarmupLR", "WarmupDecayLR", [], {},
    [0.9], [0.9, 0.999], [1.0, 2.0], [None], {"enabled": True}, {"enabled": False}, {"device": "cpu"}, {"stage": 2}, "\u00fc", "a.b",
]  # fmt: skip
SECTIONS: list[dict[str, Any]] = [
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}},
    {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}},
    {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 10}}},
    {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 10}}},
    {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 2, "loss_scale_window": 10}},
    {"bf16": {"enabled": True}},
    {"gradient_clipping": 1.0, "steps_per_print": 10, "wall_clock_breakdown": False, "prescale_gradients": False},
    {"data_types": {"grad_accum_dtype": "fp32"}, "pannier": {"unknown_keys": "error"}},
    {"activation_checkpointing": {"partition_activations": False}, "flops_profiler": {"enabled": False}},
]


def base(draw: random.Random, everyday: list[dict[str, Any]]) -> dict[str, Any]:
    """A configuration that people use, or one put together from sections."""
    if draw.random() < 0.4:
        config = copy.deepcopy(draw.choice(everyday))
        sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": 1}
        return {**config, **sizes, "gradient_clipping": 1.0, "fp16": {"enabled": False}}
    stage = draw.randrange(4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000}}
    if stage and draw.random() < 0.7:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if stage == 3 and draw.random() < 0.5:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    config.update(copy.deepcopy(SECTIONS[draw.randrange(2)]))
    for section in draw.sample(SECTIONS[2:], 2):
        config.update(copy.deepcopy(section))
    return config


def places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in `config`."""
    if not isinstance(config, dict):
        return [path]
    below = [place for key, value in config.items() for place in places(value, (*path, key))]
    return [*([path] if path else []), *below]


def mutate(draw: random.Random, config: dict[str, Any]) -> None:
    """Changes one thing, as a slip of a hand or a script might."""
    path = draw.choice(places(config))
    holder: Any = config
    for key in path[:-1]:
        holder = holder[key]
    key, kind = path[-1], draw.randrange(7)
    if kind <= 2:
        holder[key] = copy.deepcopy(draw.choice(ODD))
    elif kind == 3:
        del holder[key]
    elif kind == 4:  # A slip in the name.
        spot = draw.randrange(len(key))
        holder[key[:spot] + draw.choice(["", "x", key[spot] * 2]) + key[spot + 1 :]] = holder.pop(key)
    elif kind == 5:  # On another level.
        config[draw.choice([key, ".".join(path)])] = holder.pop(key)
    else:
        other = draw.choice(places(config))
        target: Any = config
        for part in other[:-1]:
            target = target[part]
        if isinstance(target, dict) and target is not holder:
            target[key] = copy.deepcopy(holder[key])


def outcome(config: dict[str, Any]) -> str:
    """What became of a configuration: "trained", or the message of its error."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    engine = None
    try:
        engine, _, _, _ = pannier.initialize(model=model, config=config)
        if engine.optimizer is None:
            return "trained"
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 3, dtype=model.weight.dtype)).sum())
            engine.step()
    except pannier.ConfigError as error:
        return str(error)
    finally:
        if engine is not None:
            engine.destroy()
    return "trained"


def test_mutations_train_or_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    draw = random.Random(20)
    everyday = [json.loads(path.read_text()) for path in (pathlib.Path(__file__).parent / "everyday").glob("*.json")]
    everyday = [
        {**config, "optimizer": SECTIONS[0]["optimizer"]} for config in sorted(everyday, key=lambda config: len(str(config)))
    ]
    trained, messages = 0, set()
    for number in range(COUNT):
        config = base(draw, everyday)
        for _ in range(draw.randint(1, 3)):
            mutate(draw, config)
        before = copy.deepcopy(config)
        try:
            result = outcome(config)
        except Exception as error:
            raise AssertionError(f"mutation {number}: {json.dumps(before)}: {type(error).__name__}: {error}") from error
        assert repr(config) == repr(before), "the caller's dict was changed"
        trained += result == "trained"
        if result != "trained":
            messages.add(result)
            words = set(re.findall(r"[a-z0-9_]+", result))
            known = {part for place in places(before) for key in place for part in str(key).split(".")}
            assert words & {*known, "optimizer", "train_batch_size", "config"}, f"no key in {result!r} of {json.dumps(before)}"
    assert trained > COUNT // 20 and len(messages) > COUNT // 20, (trained, len(messages))
