"""What Hugging Face's libraries touch, one by one: each touch point that no test of a whole run names."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import pannier
import ranks
from pannier import partition_names
from reference import config

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
ALL_STAGES = [(0, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def started(stage: int = 2, home: str = "cpu", optimizer: Any = None, **more: Any) -> pannier.Engine:
    zero = {} if home == "none" else {"offload_optimizer": {"device": "cpu"}}
    settings = config(None if optimizer is not None else ADAMW, stage=stage, zero={**zero, **more.pop("zero", {})}, **more)
    return pannier.initialize(model=net(), config=settings)[0] if optimizer is None else optimizer(settings)


def step(engine: pannier.Engine) -> None:
    engine.backward(engine(torch.ones(2, 3)).pow(2).mean())
    engine.step()


def test_signatures_that_are_inspected() -> None:
    assert "exclude_frozen_parameters" in inspect.signature(pannier.Engine.save_checkpoint).parameters
    assert inspect.isfunction(pannier.Engine.save_checkpoint)
    assert {"load_module_strict", "load_optimizer_states", "load_lr_scheduler_states"} <= inspect.signature(
        pannier.Engine.load_checkpoint
    ).parameters.keys()


def test_the_engine_is_a_module_and_passes_on_what_it_lacks() -> None:
    for stage, home in ALL_STAGES:
        engine = started(stage, home)
        engine.module.name_or_path, engine.tag = "mine", 7  # On either; the engine's own stays its own.
        assert isinstance(engine, nn.Module) and engine.name_or_path == "mine" and engine.tag == 7
        assert not hasattr(engine.module, "tag") and engine.module in list(engine.modules())
        assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in engine.module.named_parameters()]
        with pytest.raises(AttributeError, match="neither the engine nor its module, a Sequential, has an attribute 'generate'"):
            engine.generate()
        assert engine.config.get("zero_optimization")["stage"] == stage
        engine.destroy()


def test_the_configuration_is_shown_and_not_to_be_written() -> None:
    engine = started()
    for write in (
        lambda values: values.update(gradient_clipping=2.0),
        lambda values: values["zero_optimization"].pop("stage"),
        lambda values: values["optimizer"]["params"]["betas"].append(0.5),
    ):
        with pytest.raises(pannier.ConfigError, match="writing into it would change nothing"):
            write(engine.config)
    copied = copy.deepcopy(engine.config)
    copied["zero_optimization"]["stage"] = 7
    assert json.loads(json.dumps(engine.config)) == engine.config == pickle.loads(pickle.dumps(engine.config)) != copied
    engine.set_train_batch_size(6)
    assert engine.config["train_batch_size"] == engine.train_batch_size() == 6
    engine.destroy()


def test_a_state_dict_may_lack_what_is_allowed() -> None:
    engine = started()
    state = engine.module.state_dict()
    name, _ = state.popitem()
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict({"module": state})
    engine.load_module_state_dict({"module": state}, fetch_z3_params=True, allowed_missing_keys={name})
    with pytest.raises(pannier.ConfigError, match="of another model"):
        engine.load_module_state_dict({"module": {**state, "x": torch.ones(1)}}, allowed_missing_keys={name})
    engine.destroy()


def test_the_optimizer_shows_what_wrappers_read() -> None:
    engine = started(bf16={"enabled": False})
    optimizer = engine.optimizer
    assert optimizer.overflow is False
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval") and not hasattr(optimizer, "anything")
    step(engine)
    assert optimizer.overflow is False
    engine.backward(engine(torch.full((2, 3), torch.inf)).mean())
    engine.step()
    assert optimizer.overflow is True and not engine.was_step_applied()


def test_keys_of_the_groups_stay() -> None:
    model = net()
    basic = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(basic, lambda done: 1 / (done + 1))
    keys = set(basic.param_groups[0])
    assert {"initial_lr", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"} <= keys
    group = basic.param_groups[0]
    engine, optimizer, _, _ = pannier.initialize(
        model=model, optimizer=basic, lr_scheduler=scheduler, config=config(None, stage=2, zero={"offload_optimizer": {"device": "cpu"}})
    )
    assert optimizer.param_groups[0] is group and set(group) == keys
    for done in range(3):
        assert engine.get_lr() == [pytest.approx(0.1 / (done + 1))]
        step(engine)


def test_checkpoints_bring_lr_and_initial_lr_back_in_place(tmp_path: Any) -> None:
    def built() -> tuple[pannier.Engine, Any]:
        model = net()
        basic = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.LambdaLR(basic, lambda done: 1.0)  # Not the engine's, as the Trainer's own.
        return pannier.initialize(model=model, optimizer=basic, config=config(None, stage=1))[0], basic.param_groups[0]

    engine, group = built()
    group["lr"], group["initial_lr"] = 0.025, 0.05
    step(engine)
    engine.save_checkpoint(tmp_path)
    other, group = built()
    other.load_checkpoint(tmp_path)
    assert (group["lr"], group["initial_lr"]) == (0.025, 0.05) and other.optimizer.param_groups[0] is group


def test_flat_keys_and_values_that_the_libraries_write() -> None:
    """TRL's flat keys, one a float; accelerate's plugin; `inf`."""
    settings = {
        **config(ADAMW),
        "steps_per_print": float("inf"),
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "zero_optimization.reduce_bucket_size": 1024,
        "zero_optimization.stage3_param_persistence_threshold": 320,
        "zero_optimization.stage3_prefetch_bucket_size": 921.6,
    }
    step(pannier.initialize(model=net(), config=settings)[0])


def test_init_reads_a_configuration_whose_autos_are_not_filled_in() -> None:
    autos = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu", "pin_memory": True}},
    }
    with pannier.zero.Init(config_dict_or_path=autos):
        model = net()
    engine = pannier.initialize(model=model, config=config(ADAMW, stage=3))[0]
    step(engine)


def test_no_sync_goes_with_boundary_flags() -> None:
    for stage in (0, 1):
        results = []
        for flagged in (True, False):
            engine = started(stage, "none", gas=2)
            for last in (False, True):
                if flagged:
                    engine.set_gradient_accumulation_boundary(last)
                with contextlib.nullcontext() if last else engine.no_sync():
                    engine.backward(engine(torch.full((2, 3), 1.0 + last)).pow(2).mean())
                if last or not flagged:
                    engine.step()
            assert engine.global_steps == 1
            results.append([param.detach().clone() for param in engine.module.parameters()])
            engine.destroy()
        assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def gathered(rank: int, world: int) -> list[str]:
    """What callers give GatheredParameters; and what generation reaches for at stage 3."""
    partition_names.install()  # As `import deepspeed` does.
    wrong = []
    for home in ("cpu", "param"):
        more = {"stage3_param_persistence_threshold": 0, **({"offload_param": {"device": "cpu"}} if home == "param" else {})}
        engine = started(3, "cpu", zero=more)
        model, plain = engine.module, nn.Parameter(torch.ones(2))
        weight = model[0].weight
        for name, given in {
            "one": lambda: weight,
            "generator": lambda: (param for param in model.parameters()),
            "empty": list,
            "plain": lambda: [plain],
            "mixed": lambda: [plain, weight, None, model[2].bias],
        }.items():
            before = weight.ds_status
            with pannier.zero.GatheredParameters(given(), fwd_module=model):
                has = weight.ds_status == pannier.zero.ZeroParamStatus.AVAILABLE
                if has != (name in ("one", "generator", "mixed")):
                    wrong.append(f"{home} {name}: {weight.ds_status}")
                if has and weight.sum().isnan():
                    wrong.append(f"{home} {name}: values")
            if weight.ds_status != before:
                wrong.append(f"{home} {name}: left {weight.ds_status}")
        offload = engine.optimizer.parameter_offload
        named = [name for name, _ in offload.module.named_parameters()]
        if named != [name for name, _ in model.named_parameters()] or list(offload.module.ds_external_parameters()):
            wrong.append("module")
        if offload.forward_hooks or offload.backward_hooks or not offload.param_coordinator.is_invalid_trace():
            wrong.append("hooks")
        for param in model.parameters():
            param.ds_active_sub_modules.clear()
            if param.ds_shape != param.shape or param.ds_numel != param.numel() or param.ds_persist:
                wrong.append("names")
        step(engine)
        engine.destroy()
    return wrong


def test_gathered_parameters_take_what_callers_give() -> None:
    for ended in ranks.run(__file__, "gathered", 2):
        assert ended.result == []


def test_initialize_after_an_exception_in_mid_window() -> None:
    """`auto_find_batch_size`: an error in forward, destroy(), initialize() on the same module."""
    for stage, home in ALL_STAGES:
        model = net()
        zero = {} if home == "none" else {"offload_optimizer": {"device": "cpu"}}
        first = pannier.initialize(model=model, config=config(ADAMW, stage=stage, gas=2, zero=zero))[0]
        step(first)
        with pytest.raises(RuntimeError):
            first(torch.ones(2, 4))
        first.destroy()
        second = pannier.initialize(model=model, config=config(ADAMW, stage=stage, zero=zero))[0]
        step(second)
        fresh = started(stage, home)
        step(fresh)
        for left, right in zip(model.parameters(), fresh.module.parameters(), strict=True):
            assert torch.equal(left, right), (stage, home)
        fresh.destroy()
        second.destroy()


if __name__ == "__main__":
    ranks.main({"gathered": gathered})
