"""Reading and writing masters, states and gradients of single parameters."""

from __future__ import annotations

import pytest
import torch

import pannier
from reference import DTYPES, OPTIMIZERS, Zoo, cells, config, gradients

ADAMW = OPTIMIZERS["AdamW"][0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_can_be_read_between_backward_and_step(dtype: str) -> None:
    for stage, offload in cells():
        settings = config(ADAMW, stage=stage, offload=offload, dtype=dtype, gas=2)
        engine = pannier.initialize(model=Zoo(), config=settings)[0]
        model = engine.module
        assert pannier.safe_get_full_grad(model.matrix) is None
        first, second = (gradients(0, micro, DTYPES[dtype]) for micro in range(2))
        engine.backward(engine(first))
        engine.step()
        engine.backward(engine(second))
        want = (first["turned"] + second["turned"]) / 2
        got = pannier.safe_get_full_grad(model.turned)
        assert got.shape == model.turned.shape and got.dtype is torch.float32
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-7)
        assert pannier.safe_get_full_grad(model.unused) is None
        assert pannier.safe_get_full_grad(model.frozen) is None
        engine.step()
        assert pannier.safe_get_full_grad(model.turned) is None
        engine.destroy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_can_be_replaced(dtype: str) -> None:
    results = []
    for replaces in (False, True):
        for stage, offload in cells():
            engine = pannier.initialize(
                model=Zoo(), config=config(ADAMW, stage=stage, offload=offload, dtype=dtype, clipping=1.0)
            )[0]
            model = engine.module
            for step in range(2):
                grads = gradients(step, 0, DTYPES[dtype])
                wanted = {**grads, "turned": grads["turned"] * 2, "long": -grads["long"]}
                engine.backward(engine(grads if replaces else wanted))
                if replaces:
                    pannier.safe_set_full_grad(model.turned, wanted["turned"])
                    pannier.safe_update_full_grad_vectorized([model.long, model.frozen], lambda grad, param: -grad)
                engine.step()
            results.append([param.detach().clone() for param in model.parameters()])
            engine.destroy()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_and_states_can_be_written(dtype: str) -> None:
    for stage, offload in cells():
        engine = pannier.initialize(model=Zoo(), config=config(ADAMW, stage=stage, offload=offload, dtype=dtype))[0]
        model = engine.module
        engine.backward(engine(gradients(0, 0, DTYPES[dtype])))
        engine.step()
        value = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
        pannier.safe_set_full_fp32_param(model.matrix, value)
        assert torch.equal(pannier.safe_get_full_fp32_param(model.matrix), value)
        assert torch.allclose(model.matrix.float(), value, rtol=2**-8, atol=1e-6)
        pannier.safe_set_full_optimizer_state(model.turned, torch.full((5, 3), 0.5), "exp_avg")
        assert torch.equal(pannier.safe_get_full_optimizer_state(model.turned, "exp_avg"), torch.full((5, 3), 0.5))
        assert pannier.safe_get_full_optimizer_state(model.turned, "momentum_buffer") is None
        assert pannier.safe_get_full_fp32_param(model.frozen) is None
        with pytest.raises((pannier.ConfigError, RuntimeError)):
            pannier.safe_set_full_fp32_param(model.matrix, torch.ones(2))
        engine.destroy()


def test_strangers_have_nothing() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    assert pannier.safe_get_full_fp32_param(param) is None and pannier.safe_get_full_grad(param) is None
    pannier.safe_set_full_grad(param, torch.ones(2))
    pannier.safe_set_full_fp32_param(param, torch.zeros(2))
    assert param.tolist() == [1.0, 1.0]
