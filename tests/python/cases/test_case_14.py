"""Each group keeps its own settings, in the caller's order, with and without a schedule."""

import pytest
import torch

import pannier
from case_models import Dot, Pair, cfg, matrix, start, weight

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-8}}


def three_groups(model: Pair, frozen: Dot) -> list[dict]:
    frozen.w.requires_grad_(False)
    return [
        {"params": [model.a.w], "lr": 0.1, "weight_decay": 0.5},
        {"params": [frozen.w], "lr": 7.0},
        {"params": [model.b.w], "lr": 0.2, "weight_decay": 0.0},
    ]


def build(stage: int, dev: str, **more) -> tuple[pannier.Engine, list[dict]]:
    model = Pair(1.0, 1.0)
    model.frozen = Dot((5.0,))
    groups = three_groups(model, model.frozen)
    return start(model, cfg(stage=stage, dev=dev, opt=OPTIMIZER, **more), model_parameters=groups), groups


def one_step(engine: pannier.Engine) -> None:
    x = torch.tensor([2.0])
    engine.backward(engine.module.a(x) + engine.module.b(x) + engine.module.frozen(x))
    engine.step()


def test_settings_of_each_group() -> None:
    for stage, dev in matrix():
        engine, groups = build(stage, dev)
        assert engine.get_lr() == [0.1, 7.0, 0.2]
        assert all(mine is theirs for mine, theirs in zip(engine.optimizer.param_groups, groups, strict=True))
        one_step(engine)
        assert weight(engine, "a.w") == pytest.approx([0.85], abs=1e-6)
        assert weight(engine, "b.w") == pytest.approx([0.8], abs=1e-6)
        assert weight(engine, "frozen.w") == [5.0]


def test_warmup_starts_from_each_groups_own_rate() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    for stage, dev in matrix():
        engine, groups = build(stage, dev, scheduler=scheduler)
        used = []
        for _ in range(4):
            used.append(engine.get_lr())
            one_step(engine)
        assert [lr[0] for lr in used] == pytest.approx([0, 0, 0.05, 0.1])
        assert [lr[1] for lr in used] == pytest.approx([0, 0, 3.5, 7.0])
        assert [lr[2] for lr in used] == pytest.approx([0, 0, 0.1, 0.2])
        assert [group["lr"] for group in groups] == engine.lr_scheduler.get_last_lr()


def test_list_of_the_wrong_length_is_an_error() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}
    with pytest.raises(pannier.ConfigError) as error:
        build(2, "cpu", scheduler=scheduler)
    assert "2" in str(error.value) and "3" in str(error.value) and "warmup_max_lr" in str(error.value)


def test_empty_groups_keep_their_place() -> None:
    model = Pair(1.0, 1.0)
    groups = [{"params": [], "lr": 9.0}, {"params": [model.a.w], "lr": 0.1}, {"params": [model.b.w], "lr": 0.2}]
    engine = start(model, cfg(opt=OPTIMIZER), model_parameters=groups)
    assert engine.get_lr() == [9.0, 0.1, 0.2]
    x = torch.tensor([2.0])
    engine.backward(model.a(x) + model.b(x))
    engine.step()
    assert weight(engine, "a.w") == pytest.approx([0.9], abs=1e-6)
    assert weight(engine, "b.w") == pytest.approx([0.8], abs=1e-6)
