"""The optimizer that `initialize` returns, and schedulers on top of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pannier
from reference import DTYPES, OPTIMIZERS, Zoo, config, gradients

ADAMW = OPTIMIZERS["AdamW"][0]


def one(engine: pannier.Engine, step: int, dtype: str = "fp32") -> None:
    engine.backward(engine(gradients(step, 0, DTYPES[dtype])))
    engine.step()


def test_groups_are_the_callers_own_dicts() -> None:
    model = Zoo()
    group = {"params": [model.matrix, model.long], "lr": 0.5, "initial_lr": 0.5, "name": "big"}
    engine, optimizer, _, _ = pannier.initialize(model=model, config=config(ADAMW), model_parameters=[group])
    assert optimizer.param_groups[0] is group and group["name"] == "big" and group["initial_lr"] == 0.5
    assert group["betas"] == (0.9, 0.99) and group["weight_decay"] == 0.1 and group["eps"] == 1e-6
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is group and engine.optimizer is optimizer


def test_group_values_are_read_at_every_step() -> None:
    model = Zoo()
    group: dict[str, Any] = {"params": [model.matrix]}
    engine, optimizer, _, _ = pannier.initialize(
        model=model, config=config({"type": "AdamW", "params": {"lr": 0.1}}), model_parameters=[group]
    )
    plain = Zoo()
    reference = torch.optim.AdamW([plain.matrix], lr=0.1, weight_decay=0.0)
    values = [
        {"lr": 0.1},
        {"lr": 0.0},
        {"lr": 0.3, "weight_decay": 0.5},
        {"betas": (0.5, 0.7)},
        {"eps": 1e-2, "lr": torch.tensor(0.05)},
    ]
    for step, change in enumerate(values):
        group.update(change)
        reference.param_groups[0].update({k: float(v) if isinstance(v, torch.Tensor) else v for k, v in change.items()})
        grads = {"matrix": gradients(step, 0, torch.float32)["matrix"]}
        engine.backward(engine(grads))
        engine.step()
        plain.matrix.grad = grads["matrix"].clone()
        reference.step()
        assert torch.allclose(model.matrix, plain.matrix, rtol=0, atol=2e-6), step


@pytest.mark.parametrize("brought", ["object", "function", "config", "client_optimizer"])
def test_torch_scheduler_drives_the_engine(brought: str) -> None:
    def curve(step: int) -> float:
        return 1 / (1 + step)

    model, plain = Zoo(), Zoo()
    given: dict[str, Any] = {"config": config(OPTIMIZERS["SGD"][0])}
    if brought == "function":
        given["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
    elif brought == "config":
        given["config"]["scheduler"] = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    else:
        mine = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(mine, curve)
        given |= {"config": config(None), "optimizer": mine}
        if brought == "object":
            given["lr_scheduler"] = scheduler
    engine, _, _, returned = pannier.initialize(model=model, **given)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)
    if brought == "config":
        other = torch.optim.lr_scheduler.StepLR(reference, step_size=2, gamma=0.5)
        assert isinstance(returned, torch.optim.lr_scheduler.StepLR)
        assert engine.scheduler_name() == "StepLR"
    else:
        other = torch.optim.lr_scheduler.LambdaLR(reference, curve)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            one(engine, step)
            if brought == "client_optimizer":
                scheduler.step()
            reference.zero_grad()
            plain(gradients(step, 0, torch.float32)).backward()
            reference.step()
            other.step()
            assert engine.get_lr() == [group["lr"] for group in reference.param_groups]
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=0, atol=2e-6)


def test_scheduler_of_another_optimizer_is_refused() -> None:
    model = Zoo()
    stranger = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(stranger, lambda step: 1)
    with pytest.raises(pannier.ConfigError, match="lr_scheduler"):
        pannier.initialize(model=model, config=config(ADAMW), lr_scheduler=scheduler)


def test_scheduler_waits_for_applied_steps() -> None:
    settings = config(
        {"type": "SGD", "params": {"lr": 1.0}},
        gas=2,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    )
    engine, _, _, scheduler = pannier.initialize(model=Zoo(), config=settings)
    assert scheduler is engine.lr_scheduler and engine.get_lr() == [0.0]
    iterations = []
    for micro in range(6):
        grads = gradients(micro, 0, torch.float32)
        if micro == 2:
            grads["scalar"] = torch.tensor(float("nan"))
        engine.backward(engine(grads))
        engine.step()
        iterations.append(scheduler.last_batch_iteration)
    assert iterations == [-1, 0, 0, 0, 0, 1]


def test_what_the_wrapper_shows() -> None:
    engine, optimizer, _, _ = pannier.initialize(model=Zoo(), config=config(ADAMW, dtype="fp16", offload=True))
    assert not optimizer.overflow and optimizer.loss_scale == optimizer.cur_scale == 256
    assert optimizer.dynamic_loss_scale and optimizer.loss_scaler.cur_iter == 0 and optimizer._global_grad_norm is None
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "anything_at_all")
    optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25] and optimizer.get_lr() == 0.25
    one(engine, 0, "fp16")
    assert not optimizer.overflow and optimizer.loss_scaler.cur_iter == 1
    state = optimizer.state[engine.module.matrix]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 1
    assert state["exp_avg"].dtype is torch.float32 and state["exp_avg"].shape == (5, 7)
    assert engine.module.frozen not in optimizer.state and len(optimizer.state) == 8
    with pytest.raises(pannier.ConfigError):
        optimizer.add_param_group({"params": [engine.module.frozen]})
    with pytest.raises(pannier.ConfigError):
        optimizer.state = {1: 2}


def test_optimizer_step_and_backward_go_through_the_engine() -> None:
    engine, optimizer, _, _ = pannier.initialize(model=Zoo(), config=config(OPTIMIZERS["SGD"][0]))
    optimizer.zero_grad()
    optimizer.backward(engine(gradients(0, 0, torch.float32)))
    optimizer.step()
    assert engine.global_steps == 1
    with pytest.raises(pannier.ConfigError, match="closure"):
        optimizer.step(lambda: None)


def test_groups_changed_behind_the_engine() -> None:
    model = Zoo()
    mine = torch.optim.SGD([model.matrix], lr=0.1)
    engine = pannier.initialize(model=model, optimizer=mine, config=config(None))[0]
    mine.add_param_group({"params": [model.long]})
    engine.backward(engine({"matrix": torch.ones(5, 7)}))
    with pytest.raises(pannier.ConfigError, match="2 parameter groups, but had 1"):
        engine.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_state_dict_resumes_bit_for_bit(rule: str, dtype: str) -> None:
    settings = config(OPTIMIZERS[rule][0], dtype=dtype, offload=True, clipping=1.0)
    first, optimizer, _, _ = pannier.initialize(model=Zoo(), config=settings)
    for step in range(3):
        one(first, step, dtype)
    optimizer.param_groups[0]["lr"] *= 0.5
    saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in first.module_state_dict().items()}
    for step in range(3, 6):
        one(first, step, dtype)
    second, other, _, _ = pannier.initialize(model=Zoo(), config={**settings, "zero_optimization": {"stage": 3}})
    second.load_module_state_dict({"module": weights})
    other.load_state_dict(saved)
    for step in range(3, 6):
        one(second, step, dtype)
    for (name, left), right in zip(first.module.named_parameters(), second.module.parameters(), strict=True):
        assert torch.equal(left, right), name
    assert optimizer.state[first.module.sometimes]["step"] == other.state[second.module.sometimes]["step"]


def test_state_dict_that_does_not_fit_changes_nothing() -> None:
    engine, optimizer, _, _ = pannier.initialize(model=Zoo(), config=config(ADAMW))
    one(engine, 0)
    saved = optimizer.state_dict()
    before = optimizer.state[engine.module.matrix]["exp_avg"]
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    saved["param_groups"][0]["lr"] = 99.0
    with pytest.raises(pannier.ConfigError, match="shape"):
        optimizer.load_state_dict(saved)
    assert engine.get_lr() == [0.01] and torch.equal(optimizer.state[engine.module.matrix]["exp_avg"], before)
    with pytest.raises(pannier.ConfigError, match="groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_states_of_a_client_optimizer_are_taken_over() -> None:
    model, plain = Zoo(), Zoo()
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01) for each in (model, plain)
    ]
    for step in range(2):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(gradients(step, 0, torch.float32)).backward()
            optimizer.step()
    for each in (model, plain):
        each.zero_grad()
    engine = pannier.initialize(model=model, optimizer=optimizers[0], config=config(None, offload=True))[0]
    for step in range(2, 5):
        one(engine, step)
        optimizers[1].zero_grad()
        plain(gradients(step, 0, torch.float32)).backward()
        optimizers[1].step()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=0, atol=2e-6)


def test_adagrads_initial_accumulator() -> None:
    section = {"type": "Adagrad", "params": {"lr": 0.1, "initial_accumulator_value": 0.5}}
    model, plain, client = Zoo(), Zoo(), Zoo()
    engine = pannier.initialize(model=model, config=config(section, offload=True))[0]
    mine = torch.optim.Adagrad(
        [p for p in client.parameters() if p.requires_grad], lr=0.1, initial_accumulator_value=0.5
    )
    other = pannier.initialize(model=client, optimizer=mine, config=config(None))[0]
    reference = torch.optim.Adagrad(
        [p for p in plain.parameters() if p.requires_grad], lr=0.1, initial_accumulator_value=0.5
    )
    for step in range(3):
        one(engine, step)
        one(other, step)
        reference.zero_grad()
        plain(gradients(step, 0, torch.float32)).backward()
        reference.step()
    for left, middle, right in zip(model.parameters(), client.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=0, atol=2e-6) and torch.equal(left, middle)


def test_descriptors_refuse_amsgrad() -> None:
    model = Zoo()
    with pytest.raises(pannier.ConfigError, match="amsgrad"):
        pannier.FusedAdam(model.parameters(), amsgrad=True)


def changed(saved: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`saved` with the value at a dotted path replaced, or left out where `value` is `...`."""
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place: Any = saved
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return saved


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("state", ..., "param_groups"),
        ("state", [], "state must be a dict"),
        ("state.1", 3, "parameter 1 must be a dict"),
        ("state.99", {}, "parameter 99"),
        ("state.1.step", -1, "step of parameter 1 .* -1"),
        ("state.1.step", 1.5, "step of parameter 1"),
        ("state.1.step", "3", "step of parameter 1"),
        ("state.1.step", True, "step of parameter 1"),
        ("state.1.step", torch.tensor(float("nan")), "step of parameter 1"),
        ("state.1.exp_avg", "zeros", "exp_avg of parameter 1 must be a tensor"),
        ("state.1.exp_avg", None, "exp_avg of parameter 1 must be a tensor"),
        ("state.1.exp_avg", ..., "parameter 1 has no exp_avg"),
        ("state.1.exp_avg", torch.zeros(5, 7, dtype=torch.complex64), "complex64"),
        ("state.1.fp32_param", torch.zeros(7, 5), "shape"),
        ("loss_scaler", 1.0, "loss_scaler must be a dict"),
        ("loss_scaler.scale", ..., "loss_scaler has no scale"),
        ("loss_scaler.scale", 0.0, "scale must be above 0"),
        ("loss_scaler.iteration", "7", "iteration must be a finite number"),
        ("param_groups.0", 3, "list of dicts"),
        ("param_groups.0.lr", "fast", "group 0: lr .* 'fast'"),
        ("param_groups.0.lr", float("nan"), "group 0: lr .* nan"),
        ("param_groups.0.lr", ..., "group 0 has no lr"),
        ("param_groups.0.betas", (0.9,), "group 0: betas must be two"),
        ("param_groups.0.betas", (0.9, 1.0), "group 0: betas must be from 0"),
        ("param_groups.0.amsgrad", True, "amsgrad"),
        ("param_groups.0.maximize", True, "maximize"),
        ("param_groups.0.params", 3, "no list of params"),
        ("param_groups.0.params.1", 0, "each once"),
        ("param_groups.0.params.1", "b", "each once"),
    ],
)
def test_saved_states_that_cannot_be_change_nothing(path: str, value: Any, message: str) -> None:
    engine, optimizer, _, _ = pannier.initialize(model=Zoo(), config=config(ADAMW, dtype="fp16"))
    one(engine, 0, "fp16")
    fresh, other, _, _ = pannier.initialize(model=Zoo(), config=config(ADAMW, dtype="fp16"))
    before = other.state_dict()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps"] = 0.5
    with pytest.raises(pannier.ConfigError, match=message):
        other.load_state_dict(changed(saved, path, value))
    after = other.state_dict()
    assert before["param_groups"] == after["param_groups"] and before["loss_scaler"] == after["loss_scaler"]
    for number, state in before["state"].items():
        for key, held in state.items():
            assert torch.equal(torch.as_tensor(held), torch.as_tensor(after["state"][number][key])), (number, key)


@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_empty_saved_state_starts_anew(rule: str) -> None:
    section = {"type": rule, "params": {"lr": 0.1, **({"momentum": 0.9} if rule == "SGD" else {})}}
    engine, optimizer, _, _ = pannier.initialize(model=Zoo(), config=config(section))
    one(engine, 0)
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    for state in optimizer.state.values():
        assert state.pop("step") == 0 and state and not any(value.any() for value in state.values())
    second, _, _, _ = pannier.initialize(model=Zoo(), config=config(section))
    second.load_module_state_dict({"module": engine.module_state_dict()})
    for each in (engine, second):
        one(each, 1)
    for left, right in zip(engine.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("value", [{}, {"anything": 1}])
def test_states_cannot_be_assigned(value: dict[str, int]) -> None:
    """An empty dict starts torch's optimizers anew, and must not be passed over here."""
    engine = pannier.initialize(model=Zoo(), config=config(OPTIMIZERS["AdamW"][0]))[0]
    with pytest.raises(pannier.UsageError, match="load_state_dict"):
        engine.optimizer.state = value


def test_state_dict_of_torchs_own_sgd() -> None:
    model, plain = Zoo(), Zoo()
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9, dampening=0.5)
    plain(gradients(0, 0, torch.float32)).backward()
    reference.step()
    model.load_state_dict(plain.state_dict())
    mine = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, dampening=0.5)
    engine, optimizer, _, _ = pannier.initialize(model=model, optimizer=mine, config=config(None))
    optimizer.load_state_dict(reference.state_dict())
    one(engine, 1)
    reference.zero_grad()
    plain(gradients(1, 0, torch.float32)).backward()
    reference.step()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("rule", "key", "value"),
    [
        ("SGD", "momentum", 0.9),
        ("SGD", "maximize", True),
        ("SGD", "differentiable", True),
        ("AdamW", "amsgrad", True),
        ("AdamW", "lr", float("nan")),
        ("AdamW", "lr", "0.1"),
        ("AdamW", "lr", torch.tensor([0.1, 0.2])),
        ("AdamW", "eps", float("inf")),
        ("AdamW", "weight_decay", None),
        ("AdamW", "betas", (0.9, float("nan"))),
        ("AdamW", "betas", 0.9),
    ],
)
def test_group_values_that_cannot_be(rule: str, key: str, value: Any) -> None:
    model = Zoo()
    groups = [{"params": [model.matrix]}, {"params": [model.long]}]
    section = {"type": rule, "params": {"lr": 0.1}}
    engine, optimizer, _, _ = pannier.initialize(model=model, config=config(section), model_parameters=groups)
    before, good = model.matrix.detach().clone(), optimizer.param_groups[1].get(key, False)
    optimizer.param_groups[1][key] = value
    engine.backward(engine({"matrix": torch.ones(5, 7)}))
    with pytest.raises(pannier.ConfigError, match=f"group 1.* {key}"):
        engine.step()
    assert torch.equal(model.matrix, before) and engine.global_steps == 0
    optimizer.param_groups[1][key] = good
    engine.step()
    assert not torch.equal(model.matrix, before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_the_rule_cannot_change_after_initialize(kind: type[torch.optim.Adam]) -> None:
    model, decoupled = Zoo(), kind is torch.optim.AdamW
    mine = kind([{"params": [model.matrix]}, {"params": [model.long]}], lr=0.1, weight_decay=0.5)
    engine, optimizer, _, _ = pannier.initialize(model=model, optimizer=mine, config=config(None))
    before, saved = model.matrix.detach().clone(), optimizer.state_dict()
    saved["param_groups"][1]["decoupled_weight_decay"] = not decoupled
    message = f"group 1 sets decoupled_weight_decay to {not decoupled}, but it was {decoupled} at"
    with pytest.raises(pannier.ConfigError, match="saved parameter " + message):
        optimizer.load_state_dict(saved)
    mine.param_groups[1]["decoupled_weight_decay"] = not decoupled
    engine.backward(engine({"matrix": torch.ones(5, 7)}))
    with pytest.raises(pannier.ConfigError, match="^parameter " + message):
        engine.step()
    assert torch.equal(model.matrix, before) and engine.global_steps == 0
    mine.param_groups[1]["decoupled_weight_decay"] = decoupled
    engine.step()
    assert not torch.equal(model.matrix, before)


def test_groups_cannot_contradict_a_descriptor() -> None:
    model = Zoo()
    mine = pannier.FusedAdam([{"params": [model.matrix], "decoupled_weight_decay": False}])
    with pytest.raises(pannier.ConfigError, match="group 0 sets decoupled_weight_decay to False"):
        pannier.initialize(model=model, optimizer=mine, config=config(None))


def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def test_scheduler_that_needs_a_metric_is_the_callers_to_step(caplog: pytest.LogCaptureFixture) -> None:
    engine, _, _, scheduler = pannier.initialize(
        model=Zoo(), config=config({"type": "SGD", "params": {"lr": 1.0}}), lr_scheduler=plateau
    )
    for step in range(3):
        one(engine, step)
        scheduler.step(1.0)
    assert engine.get_lr() == [0.25]
    assert len([record for record in caplog.records if "ReduceLROnPlateau.step()" in record.getMessage()]) == 1
    engine.backward(engine(gradients(3, 0, torch.float32)))
    engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.get_lr() == [0.125]


@pytest.mark.parametrize("kind", ["ReduceLROnPlateau", "LRScheduler", "_LRScheduler"])
def test_scheduler_types_that_the_config_cannot_name(kind: str) -> None:
    with pytest.raises(pannier.ConfigError, match=kind):
        pannier.initialize(model=Zoo(), config=config(ADAMW, scheduler={"type": kind, "params": {}}))


def test_zero_grad_clears_what_was_put_into_grad() -> None:
    engine, optimizer, _, _ = pannier.initialize(model=Zoo(), config=config(ADAMW, gas=2))
    for micro in range(2):
        for zero_grad in (engine.zero_grad, optimizer.zero_grad):
            engine.module.matrix.grad = torch.ones(5, 7)
            zero_grad()
            assert engine.module.matrix.grad is None
        one(engine, micro)
    assert engine.global_steps == 1


def test_pending_micro_batches_after_the_window_changed() -> None:
    engine = pannier.initialize(model=Zoo(), config=config(ADAMW, gas=3))[0]
    counts = []
    for micro in range(4):
        counts.append(engine.pending_micro_batches())
        one(engine, micro)
    engine.drop_gradients()
    assert counts == [0, 1, 2, 0] and engine.pending_micro_batches() == 0
