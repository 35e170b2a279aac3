"""Every micro-batch reaches the optimizer."""

import pytest
import torch

from case_models import Dot, cfg, matrix, run, start, weight


def test_windows_of_four() -> None:
    for stage, dev in matrix():
        engine = start(Dot(), cfg(stage=stage, dev=dev, gas=4))
        for x in (1.0, 2.0, 3.0):
            run(engine, [[x]])
            assert engine.module.w.item() == 0.0 and not engine.was_step_applied()
        run(engine, [[10.0]])
        assert weight(engine) == pytest.approx([-0.8], abs=1e-6)
        run(engine, [[2.0]] * 4)
        assert weight(engine) == pytest.approx([-1.5081949], abs=1e-6)


def test_boundary_by_the_caller() -> None:
    for stage, dev in matrix():
        for steps_each_time in (True, False):
            engine = start(Dot(), cfg(stage=stage, dev=dev))
            xs = (0.25, 0.5, 0.75, 2.5)
            for i, x in enumerate(xs):
                last = i == len(xs) - 1
                engine.set_gradient_accumulation_boundary(last)
                assert engine.is_gradient_accumulation_boundary() is last
                engine.backward(engine(torch.tensor([x])))
                if steps_each_time or last:
                    engine.step()
            assert weight(engine) == pytest.approx([-0.8], abs=1e-6), (stage, dev, steps_each_time)


def test_no_residue_from_earlier_windows() -> None:
    for stage, dev in matrix():
        engine = start(Dot(), cfg(stage=stage, dev=dev, gas=4))
        xs = [[1.0], [2.0], [3.0], [10.0], [2.0], [2.0], [2.0], [2.0]]
        run(engine, xs)
        run(engine, xs)
        alone = start(Dot(), cfg(stage=stage, dev=dev))
        run(alone, [[4.0], [2.0], [4.0], [2.0]])
        assert weight(engine) == pytest.approx(weight(alone), abs=1e-6)


def test_several_backwards_before_a_step() -> None:
    for stage, dev in matrix():
        engine = start(Dot(), cfg(stage=stage, dev=dev))
        for _ in range(2):
            for x in (1.0, 3.0):
                engine.backward(engine(torch.tensor([x])))
            engine.step()
        alone = start(Dot(), cfg(stage=stage, dev=dev))
        run(alone, [[4.0], [4.0]])
        assert weight(engine) == weight(alone)
