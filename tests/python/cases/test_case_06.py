"""Combinations that cannot work are refused with both keys; a deprecated key works and says so."""

import logging

import pytest

import pannier
from case_models import Dot, cfg, run, start, weight


def zero(stage: int, **more) -> dict:
    return cfg(dev="none", stage=stage, zero=more)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (zero(2, offload_param={"device": "cpu"}), ["offload_param", "stage", "3"]),
        (zero(0, offload_optimizer={"device": "cpu"}), ["offload_optimizer", "stage"]),
        (zero(2, offload_optimizer={"device": "nvme"}), ["nvme", "nvme_path"]),
        (zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/tmp", "ratio": 0.5}), ["ratio"]),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 1.5}), ["ratio", "1.5"]),
        (cfg(fp16={"enabled": True}, bf16={"enabled": True}), ["fp16", "bf16"]),
        (zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}), ["cpu_offload", "offload_optimizer"]),
    ],
)
def test_forbidden_pair(config: dict, parts: list[str]) -> None:
    with pytest.raises(pannier.ConfigError) as error:
        start(Dot(), config)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_deprecated_key_works_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pannier"):
        old = start(Dot(), zero(2, cpu_offload=True))
        start(Dot(), zero(2, cpu_offload=True))
    assert caplog.text.count("cpu_offload") >= 1
    assert sum("cpu_offload" in record.getMessage() for record in caplog.records) <= 1
    new = start(Dot(), cfg())
    assert old.zero_cpu_offload() and new.zero_cpu_offload()
    for engine in (old, new):
        run(engine, [[4.0]])
    assert weight(old) == weight(new)


def test_partial_ratio_is_refused_or_partial() -> None:
    try:
        engine = start(
            Dot(tuple(float(i) for i in range(8))), zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})
        )
    except pannier.ConfigError as error:
        assert "ratio" in str(error)
    else:
        assert engine.config["zero_optimization"]["offload_optimizer"]["ratio"] == 0.5
