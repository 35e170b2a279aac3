"""The dynamic loss scale: floor, hysteresis, growth, and gradients unscaled by the scale that they were made with."""

import math

import pytest
import torch

import pannier
from case_models import Dot, cfg, matrix, start, weight

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.5, "eps": 1e-8}}


def fp16(w=(1.0,), stage: int = 2, dev: str = "cpu", **fields) -> pannier.Engine:
    return start(Dot(w), cfg(stage=stage, dev=dev, opt=OPTIMIZER, fp16={"enabled": True, **fields}))


def one(engine: pannier.Engine, x: list[float]) -> None:
    engine.backward(engine(torch.tensor(x)))
    engine.step()


def test_floor_is_reached_then_said() -> None:
    for stage, dev in matrix():
        engine = fp16(stage=stage, dev=dev, initial_scale_power=4, hysteresis=2, min_loss_scale=1)
        scales = []
        for _ in range(5):
            one(engine, [math.inf])
            scales.append(engine.optimizer.loss_scale)
        assert scales == [16, 8, 4, 2, 1]
        with pytest.raises(RuntimeError) as error:
            one(engine, [math.inf])
        assert "minimum" in str(error.value) and "w" in str(error.value) and "6" in str(error.value)
        assert weight(engine) == [1.0] and engine.skipped_steps == 6


def test_large_gradient_trains_once_the_scale_fits() -> None:
    engine = fp16(initial_scale_power=4, hysteresis=2, min_loss_scale=1)
    for _ in range(6):
        one(engine, [60000.0])
    assert engine.skipped_steps == 5 and engine.optimizer.cur_scale == 1
    assert weight(engine) == pytest.approx([0.5], abs=1e-3)


def test_growth_keeps_the_norm() -> None:
    for stage, dev in matrix():
        engine = fp16((0.0, 0.0), stage, dev, initial_scale_power=2, loss_scale_window=2, hysteresis=1)
        scales, norms = [], []
        for _ in range(8):
            one(engine, [3.0, 4.0])
            scales.append(engine.optimizer.loss_scaler.cur_scale)
            norms.append(engine.get_global_grad_norm())
        assert scales == [4, 4, 8, 8, 16, 16, 32, 32]
        assert norms == [5.0] * 8


@pytest.mark.parametrize(("consecutive", "want"), [(True, [16, 16, 16, 16, 16, 8]), (False, [16, 16, 8, 8, 4, 2])])
def test_hysteresis(consecutive: bool, want: list[int]) -> None:
    engine = fp16(initial_scale_power=4, hysteresis=2, loss_scale_window=1000, consecutive_hysteresis=consecutive)
    scales = []
    for kind in "ogogoo":
        one(engine, [math.inf if kind == "o" else 0.25])
        scales.append(engine.optimizer.cur_scale)
    assert scales == want


def test_static_scale_never_changes_and_still_skips() -> None:
    engine = fp16(loss_scale=128)
    assert not engine.optimizer.dynamic_loss_scale
    one(engine, [math.inf])
    assert engine.optimizer.overflow and engine.skipped_steps == 1 and weight(engine) == [1.0]
    one(engine, [0.25])
    assert engine.optimizer.cur_scale == 128 and weight(engine) == pytest.approx([0.5], abs=1e-3)


def test_default_power_is_sixteen() -> None:
    engine = fp16(loss_scale_window=7)
    assert engine.optimizer.cur_scale == 2**16 and engine.optimizer.loss_scaler.scale_window == 7
    assert engine.optimizer.dynamic_loss_scale and engine.optimizer.loss_scaler.dynamic
