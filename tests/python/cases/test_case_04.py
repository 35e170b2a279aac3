"""Wrong types and values out of range are errors with path and range; whole floats are integers."""

import pytest

import pannier
from case_models import OPT1, Dot, cfg, run, start, weight


def with_zero(**zero) -> dict:
    config = cfg(dev="none")
    config["zero_optimization"].update(zero)
    return config


def with_optimizer(**params) -> dict:
    return cfg(opt={"type": "AdamW", "params": {**OPT1["params"], **params}})


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        (cfg(fp16={"enabled": "false"}), "fp16.enabled", "false"),
        (with_zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size", "0"),
        (with_zero(reduce_bucket_size=-1), "zero_optimization.reduce_bucket_size", "-1"),
        (with_zero(reduce_bucket_size="5e8"), "zero_optimization.reduce_bucket_size", "5e8"),
        (with_zero(stage=4), "zero_optimization.stage", "4"),
        (with_zero(stage=7), "zero_optimization.stage", "7"),
        (with_zero(stage="2"), "zero_optimization.stage", "2"),
        (with_zero(stage=True), "zero_optimization.stage", "true"),
        (with_zero(offload_optimizer={"device": "gpu"}), "zero_optimization.offload_optimizer.device", "gpu"),
        (with_zero(offload_optimizer={"device": "CPU"}), "zero_optimization.offload_optimizer.device", "CPU"),
        (with_optimizer(lr="3e-4"), "optimizer.params.lr", "3e-4"),
        (with_optimizer(betas=[0.9]), "optimizer.params.betas", "0.9"),
        (cfg(gradient_clipping=-1), "gradient_clipping", "-1"),
    ],
)
def test_wrong_value_is_an_error(config: dict, path: str, value: str) -> None:
    with pytest.raises(pannier.ConfigError) as error:
        start(Dot(), config)
    assert path in str(error.value) and value in str(error.value), str(error.value)


def test_whole_floats_and_tiny_buckets_train_alike() -> None:
    results = []
    for bucket in (5e8, 1):
        engine = start(Dot((1.0, 2.0, 3.0)), with_zero(reduce_bucket_size=bucket))
        assert engine.zero_reduce_bucket_size() == int(bucket)
        run(engine, [[0.5, -1.0, 2.0], [1.0, 1.0, 1.0]])
        results.append(weight(engine))
    assert results[0] == results[1]


def test_null_device_means_none() -> None:
    engine = start(Dot(), with_zero(offload_optimizer={"device": None}))
    assert not engine.zero_use_cpu_optimizer()


def test_one_and_zero_are_booleans_but_no_text_is() -> None:
    engine = start(Dot(), cfg(bf16={"enabled": 1}, zero_allow_untested_optimizer=1, fp16={"enabled": 0}))
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    for wrong in (2, -1, 0.5, "1", "true", []):
        with pytest.raises(pannier.ConfigError, match=r"bf16\.enabled"):
            start(Dot(), cfg(bf16={"enabled": wrong}))


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(pannier.ConfigError, match=r"optimizer\.params\.lr: NaN"):
        start(Dot(), with_optimizer(lr=float("nan")))
