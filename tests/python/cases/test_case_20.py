"""Small gradients survive accumulation in bf16, unless a bf16 sum was asked for."""

import pytest

import pannier
from case_models import Dot, cfg, matrix, run, start, weight

INPUTS = [[1.0]] + [[2.0**-9]] * 255


@pytest.mark.parametrize("wish", [{}, {"data_types": {"grad_accum_dtype": "fp32"}}])
def test_sum_is_fp32(wish: dict) -> None:
    for stage, dev in matrix():
        engine = start(Dot(), cfg(stage=stage, dev=dev, gas=256, bf16={"enabled": True}, **wish))
        run(engine, INPUTS)
        assert engine.global_steps == 1
        assert weight(engine) == pytest.approx([-0.0058177], abs=1e-6)


def test_bf16_sum_only_on_request() -> None:
    for stage, dev in matrix():
        config = cfg(stage=stage, dev=dev, gas=256, bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"})
        try:
            engine = start(Dot(), config)
        except pannier.ConfigError as error:
            assert "grad_accum_dtype" in str(error)
            continue
        run(engine, INPUTS)
        assert weight(engine) == pytest.approx([-0.0038911], abs=1e-6)
