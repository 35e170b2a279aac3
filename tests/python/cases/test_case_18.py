"""The gradient norm is the global one, unscaled, before clipping, in every cell."""

import math

import pytest
import torch
from torch import nn

from case_models import Dot, Pair, cfg, matrix, start


class WithFrozen(Pair):
    def __init__(self) -> None:
        super().__init__(0.0, 0.0)
        self.frozen = Dot((1.0,))
        self.frozen.w.requires_grad_(False)

    def forward(self, a: float = 3.0, b: float = 4.0) -> torch.Tensor:
        one = torch.ones(1)
        return a * self.a(one) + b * self.b(one) + self.frozen(one)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Dot((0.0,))
        self.second = Dot((0.0,))
        self.second.w = self.first.w

    def forward(self) -> torch.Tensor:
        one = torch.ones(1)
        return 3 * self.first(one) + 2 * self.second(one)


@pytest.mark.parametrize(
    "dtype", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}]
)
def test_norm_is_five_everywhere(dtype: dict) -> None:
    for stage, dev in matrix():
        for gas in (1, 4):
            engine = start(WithFrozen(), cfg(stage=stage, dev=dev, gas=gas, **dtype))
            assert engine.get_global_grad_norm() is None
            for _ in range(2):
                for _ in range(gas):
                    engine.backward(engine())
                    engine.step()
                norm = engine.get_global_grad_norm()
                assert isinstance(norm, float) and norm == pytest.approx(5.0, rel=1e-5)


def test_norm_is_that_before_clipping() -> None:
    engine = start(WithFrozen(), cfg(gradient_clipping=1.0))
    engine.backward(engine())
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(5.0) and engine.optimizer._global_grad_norm == pytest.approx(
        5.0
    )


def test_tied_parameter_counts_once() -> None:
    for stage, dev in matrix():
        engine = start(Tied(), cfg(stage=stage, dev=dev))
        engine.backward(engine())
        engine.step()
        assert engine.get_global_grad_norm() == 5.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_norm_is_not_finite(value: float) -> None:
    for stage, dev in matrix():
        engine = start(WithFrozen(), cfg(stage=stage, dev=dev))
        engine.backward(engine(a=value))
        engine.step()
        norm = engine.get_global_grad_norm()
        assert isinstance(norm, float) and not math.isfinite(norm)
