"""Schedules by DeepSpeed's names, written into the groups."""

from __future__ import annotations

import math

import pytest
import torch

import pannier
from pannier import lr_schedules


def optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs])


def walk(scheduler: lr_schedules.LrSchedule, steps: int) -> list[float]:
    """What the first group's lr is at each of `steps` optimizer steps."""
    result = []
    for _ in range(steps):
        result.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step()
    return result


def test_names() -> None:
    assert lr_schedules.VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    assert set(lr_schedules.BY_NAME) == set(lr_schedules.VALID_LR_SCHEDULES)


def test_warmup_linear_and_log() -> None:
    linear = lr_schedules.WarmupLR(optimizer(0.4), warmup_num_steps=4, warmup_type="linear")
    assert walk(linear, 7) == pytest.approx([0, 0, 0.1, 0.2, 0.3, 0.4, 0.4])
    log = lr_schedules.WarmupLR(optimizer(0.4), 0.0, 0.4, 4)
    want = [0, 0, *(0.4 * math.log(i + 1) / math.log(4) for i in (1, 2, 3)), 0.4]
    assert walk(log, 6) == pytest.approx(want)


def test_no_warmup() -> None:
    assert walk(lr_schedules.WarmupLR(optimizer(0.4), warmup_num_steps=0), 3)[1:] == pytest.approx([0.4, 0.4])


def test_decay_and_cosine() -> None:
    decay = lr_schedules.WarmupDecayLR(optimizer(0.1), 6, warmup_max_lr=0.1, warmup_num_steps=2, warmup_type="linear")
    assert walk(decay, 8) == pytest.approx([0, 0, 0.05, 0.1, 0.075, 0.05, 0.025, 0])
    cosine = lr_schedules.WarmupCosineLR(optimizer(0.2), 6, warmup_num_steps=2, warmup_type="linear", cos_min_ratio=0.1)
    values = walk(cosine, 9)
    want = [0.2 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2) for k in (1, 2, 3, 4)]
    assert values[3:7] == pytest.approx(want) and values[7:] == pytest.approx([0.02, 0.02])


def test_one_cycle_moves_betas_too() -> None:
    mine = optimizer(0.1, 0.1)
    cycle = lr_schedules.OneCycle(mine, 0.1, 0.3, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9)
    betas, lrs = [], []
    assert cycle.get_mom() == [(0.9, 0.99)] * 2  # Before the first step the groups hold the least, as with DeepSpeed.
    assert mine.param_groups[0]["betas"] == (0.8, 0.99)
    for _ in range(4):
        lrs.append(mine.param_groups[1]["lr"])
        betas.append(mine.param_groups[1]["betas"][0])
        cycle.step()
        assert cycle.get_mom() == [group["betas"] for group in mine.param_groups]
    assert max(lrs) == pytest.approx(0.3) and min(betas) == pytest.approx(0.8)
    assert mine.param_groups[0]["betas"] == mine.param_groups[1]["betas"]


def test_range_test_rises() -> None:
    values = walk(lr_schedules.LRRangeTest(optimizer(1.0), 0.01, 2, 1.0), 6)
    assert values == sorted(values) and values[0] == pytest.approx(0.01) and values[-1] > values[1]


def test_resume_by_state_dict() -> None:
    def fresh() -> lr_schedules.WarmupDecayLR:
        return lr_schedules.WarmupDecayLR(optimizer(0.1, 0.2), 10, warmup_max_lr=0.1, warmup_num_steps=2)

    first, second = fresh(), fresh()
    for _ in range(5):
        first.step()
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [g["lr"] for g in second.optimizer.param_groups]
    assert walk(first, 4) == walk(second, 4)
    second.step(0)
    assert second.last_batch_iteration == 0 and second.get_lr() == second.get_last_lr()


def test_tensor_lr_is_filled_in_place() -> None:
    mine = optimizer(0.4)
    held = mine.param_groups[0]["lr"] = torch.tensor(0.4)
    scheduler = lr_schedules.WarmupLR(mine, warmup_num_steps=2, warmup_type="linear")
    for _ in range(4):
        scheduler.step()
    assert mine.param_groups[0]["lr"] is held and held.item() == pytest.approx(0.4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lr_schedules.WarmupLR(optimizer(0.1, 0.2), warmup_max_lr=[0.1, 0.2, 0.3]),
        lambda: lr_schedules.WarmupLR(optimizer(0.1), warmup_num_steps=-1),
        lambda: lr_schedules.WarmupLR(optimizer(0.1), warmup_type="cubic"),
        lambda: lr_schedules.WarmupLR(optimizer(0.1), warmup_steps=3),
        lambda: lr_schedules.OneCycle(optimizer(0.1)),
    ],
)
def test_wrong_fields(make) -> None:
    with pytest.raises(pannier.ConfigError):
        make()


def test_what_was_given_can_be_read() -> None:
    warmup = lr_schedules.WarmupLR(optimizer(0.1, 0.2), warmup_num_steps=4, warmup_type="linear")
    assert (warmup.warmup_num_steps, warmup.warmup_type) == (4, "linear")
    assert warmup.min_lrs == [0.0, 0.0] and warmup.max_lrs == [0.1, 0.2]
    cycle = lr_schedules.OneCycle(optimizer(0.1, 0.2), [0.1, 0.2], 0.3)
    assert cycle.min_lrs == [0.1, 0.2] and cycle.max_lrs == [0.3, 0.3]
    cosine = lr_schedules.WarmupCosineLR(optimizer(0.2), 6, warmup_num_steps=2, warmup_type="linear")
    cosine.step(1)
    assert cosine.get_lr_ratio() == pytest.approx(0.5)
    with pytest.raises(pannier.ConfigError, match="warmup_num_steps is None"):
        lr_schedules.WarmupLR(optimizer(0.1), warmup_num_steps=None)
