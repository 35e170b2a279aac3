"""A parameter without a gradient is left alone, as torch does, and so is its step count; one rule in every cell."""

import pytest
import torch

import pannier
from case_models import Pair, cfg, matrix, start, weight

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.0}}


def test_used_on_some_steps() -> None:
    one = torch.ones(1)
    for stage, dev in matrix():
        engine = start(Pair(1.0, 1.0), cfg(stage=stage, dev=dev, opt=OPTIMIZER))
        a, b = [], []
        for uses_b in (True, False, True):
            loss = engine.module.a(one)
            engine.backward(loss + engine.module.b(one) if uses_b else loss)
            engine.step()
            a += weight(engine, "a.w")
            b += weight(engine, "b.w")
        assert a == pytest.approx([0.9, 0.8, 0.7], abs=1e-6)
        assert b == pytest.approx([0.9, 0.9, 0.8], abs=1e-6)
        assert engine.optimizer.state[engine.module.a.w]["step"] == 3
        assert engine.optimizer.state[engine.module.b.w]["step"] == 2


def test_never_used() -> None:
    for stage, dev in matrix():
        engine = start(Pair(1.0, 1.0), cfg(stage=stage, dev=dev, opt=OPTIMIZER))
        for _ in range(3):
            engine.backward(engine.module.a(torch.ones(1)))
            engine.step()
        assert weight(engine, "a.w") == pytest.approx([0.7], abs=1e-6)
        assert weight(engine, "b.w") == [1.0]


def test_never_used_is_an_error_on_request() -> None:
    engine = start(Pair(1.0, 1.0), cfg(opt=OPTIMIZER, zero={"ignore_unused_parameters": False}))
    engine.backward(engine.module.a(torch.ones(1)))
    with pytest.raises(pannier.ConfigError, match=r"b\.w"):
        engine.step()


def test_unused_in_one_micro_batch() -> None:
    one = torch.ones(1)
    for stage, dev in matrix():
        engine = start(Pair(1.0, 1.0), cfg(stage=stage, dev=dev, gas=2))
        for _ in range(3):
            engine.backward(engine.module.a(one) + 4 * engine.module.b(one))
            engine.step()
            engine.backward(engine.module.a(one))
            engine.step()
        alone = start(Pair(1.0, 1.0), cfg(stage=stage, dev=dev))
        for _ in range(3):
            alone.backward(alone.module.a(one) + 2 * alone.module.b(one))
            alone.step()
        assert weight(engine, "a.w") == weight(alone, "a.w") and weight(engine, "b.w") == weight(alone, "b.w")
