"""A gradient that is not finite changes nothing, in any dtype, on any micro-batch, and is reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pannier
from reference import DTYPES, OPTIMIZERS, Zoo, cells, config, gradients


def snapshot(engine: pannier.Engine) -> dict[str, Any]:
    """Everything that a skipped step must leave alone."""
    result: dict[str, Any] = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    for number, (param, state) in enumerate(engine.optimizer.state.items()):
        result.update({f"{number}.{key}": torch.as_tensor(value) for key, value in state.items()})
        result[f"{number}.master"] = pannier.safe_get_full_fp32_param(param)
    result["lr"] = torch.tensor(engine.get_lr())
    result["scheduler"] = torch.tensor(engine.lr_scheduler.state_dict()["last_batch_iteration"])
    return result


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before if not torch.equal(before[key], after[key])]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_gradient_changes_nothing(dtype: str, value: float, capfd: pytest.CaptureFixture[str]) -> None:
    gas = 3
    for stage, offload in cells():
        model = Zoo()
        settings = config(
            OPTIMIZERS["AdamW"][0],
            stage=stage,
            offload=offload,
            dtype=dtype,
            gas=gas,
            clipping=1.0,
            scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_num_steps": 10}},
        )
        engine, optimizer, _, _ = pannier.initialize(model=model, config=settings)

        def window(step: int, bad: int | None) -> None:
            for micro in range(gas):
                grads = gradients(step, micro, DTYPES[dtype])
                if micro == bad:
                    grads["matrix"][2, 3] = value
                engine.backward(engine(grads))
                engine.step()

        window(0, None)
        assert not optimizer.overflow and engine.was_step_applied()
        for bad in range(gas):
            before = snapshot(engine)
            window(1, bad)
            assert changed(before, snapshot(engine)) == []
            assert optimizer.overflow and not engine.was_step_applied()
            assert engine.skipped_steps == bad + 1 and engine.global_steps == bad + 2
            norm = engine.get_global_grad_norm()
            assert isinstance(norm, float) and not math.isfinite(norm)
        assert "matrix" in capfd.readouterr().err
        before = snapshot(engine)
        window(2, None)
        assert not optimizer.overflow and {"matrix", "lr", "scheduler"} <= set(changed(before, snapshot(engine)))
        engine.destroy()


def test_bf16_without_the_check_lets_it_through() -> None:
    model = Zoo()
    settings = config(OPTIMIZERS["SGD"][0], bf16={"enabled": True, "check_grad_overflow": False})
    engine, _, _, _ = pannier.initialize(model=model, config=settings)
    grads = gradients(0, 0, torch.bfloat16)
    grads["matrix"][0, 0] = math.nan
    engine.backward(engine(grads))
    engine.step()
    assert torch.isnan(model.matrix).any() and engine.skipped_steps == 0


def test_user_edits_count_on_every_path() -> None:
    for dtype in DTYPES:
        results = []
        for offload in (False, True):
            model = Zoo()
            engine, _, _, _ = pannier.initialize(
                model=model, config=config(OPTIMIZERS["AdamW"][0], offload=offload, dtype=dtype)
            )
            for step in range(4):
                engine.backward(engine(gradients(step, 0, DTYPES[dtype])))
                engine.step()
                with torch.no_grad():
                    model.matrix[0].zero_()
                    model.long.data[7] = 3.0
                engine.parameters_changed()
            results.append((model.matrix.detach().clone(), model.long.detach().clone()))
            assert pannier.safe_get_full_fp32_param(model.long)[7] == 3.0
            assert not torch.isnan(results[-1][0]).any()
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_stale_graph_is_noticed() -> None:
    """A graph built before an update is refused in backward, as torch does after its own optimizers."""
    model = torch.nn.Linear(2, 1, bias=False)
    engine, _, _, _ = pannier.initialize(model=model, config=config(OPTIMIZERS["SGD"][0]))
    x = torch.ones(1, 2, requires_grad=True)
    first, second = engine(x).sum(), engine(x).sum()
    engine.backward(first)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(second)
