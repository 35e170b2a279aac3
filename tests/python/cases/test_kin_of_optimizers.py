"""Relatives of the cases about optimizers, groups and schedules: what people do with theirs while an engine has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import pannier
from case_batches import OPTIMIZER, batches, mlp
from case_models import Dot, Pair, cfg, run, start, weight

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def one(engine: pannier.Engine) -> None:
    x = torch.ones(1)
    engine.backward(engine.module.a(x) + engine.module.b(x))
    engine.step()


def with_own(lr: Any = 0.1, **kw: Any) -> tuple[pannier.Engine, torch.optim.Optimizer]:
    """An engine with the caller's own optimizer, which has the first of two parameters."""
    model = Pair(1.0, 1.0)
    mine = torch.optim.AdamW(model.a.parameters(), lr=lr, eps=1e-8, weight_decay=0.0)
    return start(model, cfg(opt=None), optimizer=mine, **kw), mine


@pytest.mark.parametrize(
    "change",
    [
        lambda group, other: group["params"].append(other),
        lambda group, other: group["params"].clear(),
        lambda group, other: group.update(params=[other]),
    ],
)
def test_parameters_changed_in_a_group_are_an_error(change: Callable[..., None]) -> None:
    engine, mine = with_own()
    change(mine.param_groups[0], engine.module.b.w)
    with pytest.raises(pannier.UsageError, match="group 0 does not hold the 1 parameters"):
        one(engine)
    assert engine.module.a.w.item() == 1.0


@pytest.mark.parametrize("of", ["given", "returned"])
def test_a_new_list_of_groups_counts(of: str) -> None:
    engine, mine = with_own()
    optimizer = mine if of == "given" else engine.optimizer
    optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    assert engine.get_lr() == [0.5] and mine.param_groups is engine.optimizer.param_groups
    one(engine)
    assert weight(engine, "a.w") == pytest.approx([0.5], abs=1e-6)


def test_states_loaded_past_the_engine_are_an_error() -> None:
    model = Pair(1.0, 1.0)
    other = torch.optim.AdamW(model.a.parameters(), lr=0.1)
    model.a(torch.ones(1)).backward()
    other.step()
    saved = other.state_dict()
    engine, mine = with_own()
    mine.load_state_dict(saved)
    with pytest.raises(pannier.UsageError, match="has states of its own.*that initialize.. returned"):
        one(engine)
    engine, _ = with_own()
    engine.optimizer.load_state_dict(saved)
    one(engine)
    assert engine.optimizer.state[engine.module.a.w]["step"] == 2


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
def test_a_value_that_is_gone_is_missed(key: str) -> None:
    engine, mine = with_own()
    del mine.param_groups[0][key]
    with pytest.raises(pannier.ConfigError, match=f"group 0 has no {key}"):
        one(engine)


@pytest.mark.parametrize(("key", "value"), [("eps", -1.0), ("weight_decay", -0.1), ("lr", True)])
def test_values_that_no_optimizer_takes(key: str, value: Any) -> None:
    engine, mine = with_own()
    mine.param_groups[0][key] = value
    with pytest.raises(pannier.ConfigError, match=f"group 0: {key} must be"):
        one(engine)


def test_a_schedule_may_round_below_zero() -> None:
    engine, mine = with_own(lr_scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: -1e-20))
    one(engine)
    assert weight(engine, "a.w") == pytest.approx([1.0])


def test_groups_with_an_lr_below_zero_are_refused() -> None:
    model = Dot()
    with pytest.raises(pannier.ConfigError, match="group 0: lr must be at least 0, not -1"):
        start(model, cfg(), model_parameters=[{"params": [model.w], "lr": -1}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: model.w, "in a list, not a Parameter"),
        (lambda model: dict(model.named_parameters()), "in a list, not a dict"),
        (lambda model: 5, "in a list, not a int"),
        (lambda model: [{"lr": 0.1}], "group 0 has no params, only lr"),
        (lambda model: ["w"], "can only optimize Tensors"),
    ],
)
def test_model_parameters_that_cannot_be(given: Callable[[Dot], Any], message: str) -> None:
    model = Dot()
    with pytest.raises(pannier.ConfigError, match=message):
        start(model, cfg(), model_parameters=given(model))


def test_named_parameters_keep_their_names() -> None:
    model = Pair(0.0, 0.0)
    engine = start(model, cfg(), model_parameters=model.named_parameters())
    assert engine.optimizer.param_groups[0]["param_names"] == ["a.w", "b.w"]
    one(engine)
    saved = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(saved)
    assert saved["param_groups"][0]["param_names"] == ["a.w", "b.w"]


def test_step_hooks_run_around_each_update() -> None:
    engine, mine = with_own()
    seen: list[str] = []
    for name, optimizer in (("given", mine), ("returned", engine.optimizer)):
        optimizer.register_step_pre_hook(lambda *_, name=name: seen.append(f"{name} before {engine.module.a.w.item():.1f}"))
        optimizer.register_step_post_hook(lambda *_, name=name: seen.append(f"{name} after {engine.module.a.w.item():.1f}"))
    once = ["returned before 1.0", "given before 1.0", "returned after 0.9", "given after 0.9"]
    one(engine)
    assert seen == once
    seen.clear()
    engine.set_gradient_accumulation_boundary(False)
    one(engine)
    assert seen == []
    engine.set_gradient_accumulation_boundary(True)
    x = torch.ones(1)
    engine.backward(engine.module.a(x) + engine.module.b(x))
    engine.optimizer.step()
    assert len(seen) == 4
    seen.clear()
    engine.backward((engine.module.a(x) + engine.module.b(x)) * float("inf"))
    engine.step()
    assert seen == ["returned before 0.8", "given before 0.8"]  # A skipped step has no after.


def test_a_pre_hook_may_set_the_lr() -> None:
    engine, mine = with_own()
    mine.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.5))
    one(engine)
    assert weight(engine, "a.w") == pytest.approx([0.5], abs=1e-6)


def test_the_returned_optimizer_may_be_given_again() -> None:
    model = Dot()
    first = start(model, cfg())
    optimizer = first.optimizer
    first.destroy()
    run(start(model, cfg(opt=None), optimizer=optimizer), [[4.0]])
    assert model.w.item() == pytest.approx(-0.8, abs=1e-6)


@pytest.mark.parametrize("given", [object(), "WarmupLR", 3, lambda optimizer: object()])
def test_what_is_no_scheduler_is_refused_at_once(given: Any) -> None:
    with pytest.raises(pannier.ConfigError, match=r"lr_scheduler must be a scheduler.* has no step\(\)"):
        start(Dot(), cfg(), lr_scheduler=given)


@pytest.mark.parametrize("twice", [True, False])
def test_a_schedule_stepped_twice_is_said_once(twice: bool, caplog: pytest.LogCaptureFixture) -> None:
    for own in (lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5), None):
        section = {} if own else {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
        engine = start(Dot(), cfg(**section), lr_scheduler=own)
        for step in range(5):
            run(engine, [[1.0]])
            if twice or step == 1:
                engine.lr_scheduler.step()
    assert len([record for record in caplog.records if "twice the pace" in record.getMessage()]) == 2 * twice


def compared(make: Make, schedule: Callable[[torch.optim.Optimizer], Any] | None = None, clip: float = 0.0) -> None:
    """Trains with an engine and with plain torch, and compares weights, rates and betas."""
    plain, model = mlp(), mlp()
    reference, mine = make(plain), make(model)
    theirs = None if schedule is None else schedule(reference)
    own = {} if schedule is None else {"lr_scheduler": schedule(mine)}
    config = cfg(opt=None, gradient_clipping=clip)
    engine = start(model, config, optimizer=mine, **own)
    for x, y in batches()[:6]:
        reference.zero_grad()
        torch.nn.functional.mse_loss(plain(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        reference.step()
        if theirs is not None:
            theirs.step()
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()
        assert [float(lr) for lr in engine.get_lr()] == [float(group["lr"]) for group in reference.param_groups]
        for group, other in zip(mine.param_groups, reference.param_groups, strict=True):
            assert group.get("betas") == other.get("betas") and group.get("momentum") == other.get("momentum")
    for have, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=2e-6)
    engine.destroy()


def adamw(**kw: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), **{**OPTIMIZER["params"], **kw})


@pytest.mark.parametrize(
    "make",
    [
        adamw(betas=[0.8, 0.95]),
        adamw(betas=(0.0, 0.0)),
        adamw(eps=0.0),
        adamw(fused=True),
        adamw(foreach=True),
        lambda model: adamw(lr=torch.tensor(0.01), foreach=False)(model),
        lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.3, decoupled_weight_decay=True),
        lambda model: torch.optim.SGD(
            [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[2:].parameters()}], lr=0.1
        ),
    ],
)
def test_optimizers_are_those_of_torch(make: Make) -> None:
    compared(make)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
        lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)]),
        lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    ],
)
def test_schedules_are_those_of_torch(schedule: Callable[..., Any], tensor: bool) -> None:
    compared(lambda model: adamw(lr=torch.tensor(0.01) if tensor else 0.01, foreach=False)(model), schedule)


@pytest.mark.parametrize("clip", [1e-30, 1e-3, 0.05, 1e30])
def test_clipping_is_that_of_torch(clip: float) -> None:
    compared(lambda model: torch.optim.SGD(model.parameters(), lr=1.0), clip=clip)
