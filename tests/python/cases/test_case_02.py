"""Unknown and misspelt keys are errors with their path and the nearest name, all at once."""

import logging

import pytest

import pannier
from case_models import Dot, cfg, start


@pytest.mark.parametrize(
    ("wrong", "path", "nearest"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimzer": {"device": "cpu"}}},
            "zero_optimization.offload_optimzer",
            "offload_optimizer",
        ),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "zero_optimization.offload_optimizer"),
        ({"fp16": {"enabled": True, "loss_scal": 8}}, "fp16.loss_scal", "loss_scale"),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
            "optimizer.params.learning_rate",
            "lr",
        ),
    ],
)
def test_unknown_key_is_an_error(wrong: dict, path: str, nearest: str) -> None:
    with pytest.raises(pannier.ConfigError) as error:
        start(Dot(), {**cfg(), **wrong})
    assert path in str(error.value) and nearest in str(error.value), str(error.value)


def test_all_unknown_keys_are_said_at_once() -> None:
    config = {**cfg(), "traain_batch_size": 1, "fp16": {"enabledd": False}}
    config["zero_optimization"]["stagee"] = 1
    with pytest.raises(pannier.ConfigError) as error:
        start(Dot(), config)
    for path in ("traain_batch_size", "fp16.enabledd", "zero_optimization.stagee"):
        assert path in str(error.value)


def test_known_key_that_is_not_supported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pannier"):
        start(Dot(), cfg(flops_profiler={"enabled": False}))
    assert "flops_profiler" in caplog.text
    with pytest.raises(pannier.ConfigError, match="flops_profiler"):
        start(Dot(), cfg(flops_profiler={"enabled": True}))


def test_unknown_keys_can_be_turned_into_notes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pannier"):
        engine = start(Dot(), cfg(pannier={"unknown_keys": "warn"}, my_own_section={"a": 1}))
    assert "my_own_section" in caplog.text and engine.zero_optimization_stage() == 2
