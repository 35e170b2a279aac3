"""The incomplete window at the end of an epoch: carried over, or closed by the caller."""

import pathlib

import pytest
import torch

import pannier
from case_models import Dot, cfg, matrix, run, start, weight


def six(stage: int, dev: str):
    engine = start(Dot(), cfg(stage=stage, dev=dev, gas=4))
    run(engine, [[4.0]] * 4 + [[8.0]])
    return engine


def test_window_is_carried_over() -> None:
    for stage, dev in matrix():
        engine = six(stage, dev)
        run(engine, [[8.0]])
        assert weight(engine) == pytest.approx([-0.8], abs=1e-6)
        assert (engine.global_steps, engine.micro_steps) == (1, 6)
        assert not engine.is_gradient_accumulation_boundary()
        run(engine, [[0.0], [0.0]])
        assert weight(engine) == pytest.approx([-1.6], abs=1e-6)
        assert (engine.global_steps, engine.micro_steps) == (2, 8)


def test_caller_can_close_it_with_the_fixed_divisor() -> None:
    for stage, dev in matrix():
        engine = six(stage, dev)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.tensor([8.0])))
        engine.step()
        assert weight(engine) == pytest.approx([-1.6], abs=1e-6)
        engine.set_gradient_accumulation_boundary(None)
        # Nothing is left over: the next window is four of its own.
        before = weight(engine)
        run(engine, [[0.0]] * 3)
        assert weight(engine) == before and engine.global_steps == 2
        run(engine, [[0.0]])
        assert engine.global_steps == 3


def test_a_checkpoint_says_what_is_pending(tmp_path: pathlib.Path) -> None:
    for stage, dev in matrix():
        engine = six(stage, dev)
        run(engine, [[8.0]])
        with pytest.raises(pannier.UsageError, match="2 of 4 micro-batches"):
            engine.save_checkpoint(tmp_path)
        assert list(tmp_path.iterdir()) == []
        run(engine, [[0.0], [0.0]])  # The refusal changed nothing.
        assert weight(engine) == pytest.approx([-1.6], abs=1e-6)
        engine.destroy()
