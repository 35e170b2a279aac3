"""The caller's dict is never changed; several engines live side by side; a managed model is refused."""

import copy

import pytest
import torch

import pannier
from case_models import Dot, cfg, matrix, run, start, weight


def test_config_is_untouched_and_engines_are_apart() -> None:
    for stage, dev in matrix():
        config = cfg(stage=stage, dev=dev)
        original = copy.deepcopy(config)
        first, second = start(Dot(), config), start(Dot(), config)
        run(first, [[4.0]])
        run(second, [[2.0]])
        assert config == original
        assert weight(first) == pytest.approx([-0.8], abs=1e-6)
        assert weight(second) == pytest.approx([-2 / 3], abs=1e-6)
        with pytest.raises(pannier.ConfigError, match="already managed by an engine"):
            start(first.module, config)
        run(first, [[1.0]])
        alone = start(Dot(), config)
        run(alone, [[4.0], [1.0]])
        assert weight(first) == weight(alone)


def test_parameter_shared_with_a_managed_model_is_refused() -> None:
    engine = start(Dot(), cfg())
    with pytest.raises(pannier.ConfigError, match="already managed"):
        start(torch.nn.Sequential(engine.module), cfg())


def test_destroy_lets_the_model_be_initialized_again() -> None:
    for stage, dev in matrix():
        model = Dot()
        first = start(model, cfg(stage=stage, dev=dev))
        run(first, [[4.0]])
        first.destroy()
        first.destroy()
        with pytest.raises(pannier.ConfigError, match="destroyed"):
            first.backward(first.module(torch.ones(1)))
        second = start(model, cfg(stage=stage, dev=dev))
        run(second, [[2.0]])
        assert weight(second) == pytest.approx([-0.8 - 2 / 3], abs=1e-6)
        second.destroy()


def test_destroy_in_mid_window_leaves_nothing_behind() -> None:
    model = Dot()
    first = start(model, cfg(gas=4))
    run(first, [[4.0]])
    first.destroy()
    second = start(model, cfg())
    run(second, [[2.0]])
    assert weight(second) == pytest.approx([-2 / 3], abs=1e-6)


def test_engine_that_is_only_dropped_lets_go_too() -> None:
    model = Dot()
    engine = start(model, cfg())
    del engine
    run(start(model, cfg()), [[1.0]])
    assert model.w.item() == pytest.approx(-0.5, abs=1e-6)
