"""Relatives of the cases about windows, norms and odd parameters, in every stage and home."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pannier
from case_models import Dot, cfg, matrix, run, start, weight
from kin_on_ranks import Odds


def engines(**kw: object) -> Iterator[pannier.Engine]:
    for stage, dev in matrix():
        engine = start(Dot(), cfg(stage=stage, dev=dev, **kw))  # type: ignore[arg-type]
        yield engine
        engine.destroy()


def test_evaluation_inside_a_window_counts_for_nothing() -> None:
    for engine in engines(gas=4):
        run(engine, [[4.0]])
        engine.eval()
        with torch.no_grad():
            assert engine(torch.ones(1)).item() == 0.0
        with torch.inference_mode():
            assert engine(torch.ones(1)).item() == 0.0
        engine.train()
        assert engine.micro_steps == 1
        run(engine, [[4.0]] * 3)
        assert weight(engine) == pytest.approx([-0.8], abs=1e-6) and engine.global_steps == 1


def test_forwards_and_backwards_in_another_order() -> None:
    for engine in engines(gas=2):
        first, second = engine(torch.tensor([2.0])), engine(torch.tensor([6.0]))
        for loss in (second, first):
            engine.backward(loss)
            engine.step()
        assert weight(engine) == pytest.approx([-0.8], abs=1e-6)


def test_verbs_work_where_gradients_are_off() -> None:
    for engine in engines():
        loss = engine(torch.tensor([4.0]))
        with torch.no_grad():
            engine.backward(loss)
        with torch.inference_mode():
            engine.step()
        assert weight(engine) == pytest.approx([-0.8], abs=1e-6)
        run(engine, [[0.0]])


def test_norm_is_that_of_the_last_whole_window() -> None:
    for engine in engines(gas=2):
        norms = []
        for x in (3.0, 5.0, 1.0):
            run(engine, [[x]])
            norms.append(engine.get_global_grad_norm())
        assert norms == [None, 4.0, 4.0]


class Parts(nn.Module):
    """Parameters of several sizes, any of which a forward may leave out; the gradient of each is its number from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (17, 129, 129, 1000)])

    def forward(self, unused: int) -> torch.Tensor:
        return sum((i + 1) * part.sum() for i, part in enumerate(self.parts) if i != unused)


@pytest.mark.parametrize("unused_in", [0, 1])
def test_norm_counts_what_takes_part_in_one_micro_batch_only(unused_in: int) -> None:
    for stage, dev in matrix():
        for unused in range(4):
            model = Parts()
            engine = start(model, cfg(stage=stage, dev=dev, gas=2, opt={"type": "SGD", "params": {"lr": 1.0}}))
            for micro in range(2):
                engine.backward(engine(unused if micro == unused_in else -1))
                engine.step()
            gradients = [(i + 1) * (0.5 if i == unused else 1.0) for i in range(4)]
            square = sum(part.numel() * gradient**2 for part, gradient in zip(Parts().parts, gradients, strict=True))
            assert engine.get_global_grad_norm() == pytest.approx(math.sqrt(square), rel=1e-9), (stage, dev, unused)
            for i, gradient in enumerate(gradients):
                assert set(weight(engine, f"parts.{i}")) == {-gradient}
            engine.destroy()


def test_closing_a_window_by_hand_does_not_shift_the_next() -> None:
    for engine in engines(gas=4):
        engine.set_gradient_accumulation_boundary(True)
        run(engine, [[4.0]])
        engine.set_gradient_accumulation_boundary(None)
        steps = []
        for _ in range(4):
            run(engine, [[0.0]])
            steps.append(engine.global_steps)
        assert steps == [1, 1, 1, 2]


def test_clipping_after_a_skipped_step_and_of_nothing() -> None:
    for engine in engines(opt={"type": "SGD", "params": {"lr": 1.0}}, gradient_clipping=1.0):
        run(engine, [[math.inf]])
        assert engine.get_global_grad_norm() == math.inf and engine.skipped_steps == 1
        run(engine, [[0.0]])
        assert weight(engine) == [0.0] and engine.get_global_grad_norm() == 0.0
        run(engine, [[2.0]])
        assert weight(engine) == pytest.approx([-1.0], abs=1e-6) and engine.get_global_grad_norm() == 2.0


def test_parameters_of_few_elements_survive_a_checkpoint(tmp_path: pathlib.Path) -> None:
    for stage, dev in matrix():
        first, second = (start(Odds(rank), cfg(stage=stage, dev=dev)) for rank in (0, 1))
        first.backward(first(1.0))
        first.step()
        first.save_checkpoint(tmp_path / f"{stage}{dev}")
        second.load_checkpoint(tmp_path / f"{stage}{dev}")
        for engine in (first, second):
            engine.backward(engine(2.0))
            engine.step()
        left, right = first.module_state_dict(), second.module_state_dict()
        assert all(torch.equal(left[name], right[name]) and left[name].shape == right[name].shape for name in left)
        first.destroy()
        second.destroy()


class Nothing(nn.Module):
    """All that it trains is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(0, 3))

    def forward(self) -> torch.Tensor:
        return self.w.sum()


def test_a_model_of_empty_parameters_trains_nothing() -> None:
    for stage, dev in matrix():
        engine = start(Nothing(), cfg(stage=stage, dev=dev))
        engine.backward(engine())
        engine.step()
        assert engine.get_global_grad_norm() == 0.0 and engine.global_steps == 1
        engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int64, torch.complex64])
def test_frozen_parameters_keep_types_that_do_not_train(dtype: torch.dtype, stage: int) -> None:
    model = Dot((1.0,))
    model.codes = nn.Parameter(torch.ones(4).to(dtype), requires_grad=False)
    engine = start(model, cfg(stage=stage, bf16={"enabled": True}))
    run(engine, [[0.5]])
    codes = engine.module_state_dict()["codes"]
    assert codes.dtype == dtype and bool((codes == torch.ones(4).to(dtype)).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_trained_parameters_of_other_types_are_refused(dtype: torch.dtype) -> None:
    model = Dot()
    model.w.data = model.w.data.to(dtype)
    with pytest.raises(pannier.ConfigError, match="parameter w is (Double|ComplexFloat), expected Float"):
        start(model, cfg())
