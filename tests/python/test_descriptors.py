"""DeepSpeed's optimizers outside of an engine: they update parameters on the CPU, as torch's do."""

from __future__ import annotations

import pytest
import torch

import pannier
from pannier.descriptors import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam
from reference import config


def run(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, steps: int) -> None:
    for step in range(steps):
        param.grad = torch.cos(torch.arange(param.numel()) + step).view_as(param).to(param.dtype)
        optimizer.step()


def start(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.sin(torch.arange(12.0)).view(3, 4).t().to(dtype))  # Not contiguous.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (lambda p: DeepSpeedCPUAdam(p, lr=0.1, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        (lambda p: FusedAdam(p, lr=0.1, adam_w_mode=False, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
        (lambda p: DeepSpeedCPUAdagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
)  # fmt: skip
def test_steps_are_torchs(ours, torchs, dtype: torch.dtype) -> None:
    left, right = start(dtype), start(torch.float32)
    run(ours([left]), left, 5)
    run(torchs([right]), right, 5)
    exact = dtype == torch.float32
    torch.testing.assert_close(left.detach().float(), right.detach(), rtol=0, atol=1e-6 if exact else 2e-2)


def test_states_may_be_of_the_parameters_type() -> None:
    exact, rounded = start(torch.bfloat16), start(torch.bfloat16)
    left, right = DeepSpeedCPUAdam([exact], lr=0.1), DeepSpeedCPUAdam([rounded], lr=0.1, fp32_optimizer_states=False)
    run(left, exact, 5)
    run(right, rounded, 5)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert left.state[exact][kind].dtype is torch.float32 and right.state[rounded][kind].dtype is torch.bfloat16
        torch.testing.assert_close(right.state[rounded][kind].float(), left.state[exact][kind], rtol=0, atol=2e-2)
    torch.testing.assert_close(rounded.detach(), exact.detach(), rtol=0, atol=4e-2)


def test_lion_moves_by_its_rate() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    param.grad = torch.tensor([3.0, -0.5])
    DeepSpeedCPULion([param], lr=0.25).step()
    assert param.tolist() == [0.75, 1.25]


def test_an_engine_goes_on_with_the_states_and_then_steps_itself() -> None:
    alone, engines = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3, bias=False)
    engines.load_state_dict(alone.state_dict())
    optimizer, other = (DeepSpeedCPUAdam(model.parameters(), lr=0.1) for model in (alone, engines))
    run(optimizer, alone.weight, 5)
    run(other, engines.weight, 3)
    engine = pannier.initialize(model=engines, optimizer=other, config=config(None, stage=2))[0]
    for step in (3, 4):
        weights = torch.cos(torch.arange(12) + step).view_as(engines.weight)
        engine.backward((engines.weight * weights).sum())
        engine.step()
    assert torch.equal(engines.weight, alone.weight)
    with pytest.raises(pannier.UsageError, match="an engine manages"):
        other.step()


def test_what_is_wrong_changes_nothing() -> None:
    param = start()
    optimizer = DeepSpeedCPUAdam([param], lr=0.1)
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(pannier.ConfigError, match="lr must be a finite number"):
        optimizer.step()
    assert torch.equal(param, before)
