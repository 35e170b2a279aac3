"""What `initialize` takes and gives back."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pannier
from reference import config

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def one_step(engine: pannier.Engine) -> list[torch.Tensor]:
    engine.backward(engine(torch.ones(2, 3)).pow(2).mean())
    engine.step()
    return [param.detach().clone() for param in engine.module.parameters()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_four_values() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(6, 3))
    result = pannier.initialize(model=model(), config=config(ADAMW), training_data=data)
    assert isinstance(result, tuple) and len(result) == 4
    engine, optimizer, loader, scheduler = result
    assert isinstance(engine, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    assert engine.optimizer is optimizer and engine.training_dataloader is loader and scheduler is None
    assert len(loader) == 6


def test_without_optimizer_only_forward_runs() -> None:
    for stage in range(4):
        module = model()
        want = module(torch.ones(2, 3))
        engine, optimizer, loader, scheduler = pannier.initialize(model=module, config=config(None, stage=stage))
        assert (optimizer, loader, scheduler) == (None, None, None)
        assert torch.equal(engine(torch.ones(2, 3)), want)
        for verb in (lambda: engine.backward(want.sum()), engine.step, lambda: engine.scale(want.sum())):
            with pytest.raises(pannier.ConfigError, match="optimizer"):
                verb()
        engine.destroy()


@pytest.mark.parametrize("how", ["dict", "path", "pathlib", "commented", "base64", "args", "config_params"])
def test_config_from_everywhere(how: str, tmp_path: Path) -> None:
    values = {**config(ADAMW), "steps_per_print": float("inf")} if how in ("dict", "config_params") else config(ADAMW)
    text = json.dumps(values)
    path = tmp_path / "ds.json"
    path.write_text(text.replace("{", "{ // a comment\n /* and\n another */", 1) if how == "commented" else text)
    given = {
        "dict": {"config": values},
        "path": {"config": str(path)},
        "pathlib": {"config": path},
        "commented": {"config": str(path)},
        "base64": {"config": base64.urlsafe_b64encode(text.encode()).decode()},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "config_params": {"config_params": values},
    }[how]
    engine = pannier.initialize(model=model(), **given)[0]
    assert engine.config["optimizer"]["type"] == "AdamW" and engine.get_lr() == [0.1]
    assert engine.zero_optimization_stage() == 2


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, ["configuration"]),
        ({"config": "/no/such/file.json"}, ["/no/such/file.json"]),
        ({"config": 3}, ["int"]),
        ({"config": {"a": object()}}, ["object"]),
        ({"config": {}, "args": argparse.Namespace(deepspeed_config="x.json")}, ["twice"]),
    ],
)
def test_config_that_is_none(given: dict, parts: list[str]) -> None:
    with pytest.raises(pannier.ConfigError) as error:
        pannier.initialize(model=model(), **given)
    assert all(part in str(error.value) for part in parts)


def test_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"zero_optimization": {"stage": 2}')
    with pytest.raises(pannier.ConfigError, match=r"broken\.json"):
        pannier.initialize(model=model(), config=str(path))
    with pytest.raises(pannier.IoError) as error:
        pannier.initialize(model=model(), config=tmp_path)
    assert error.value.errno and error.value.filename == str(tmp_path)


def test_optimizers_of_every_kind_agree() -> None:
    results = []
    for make in (
        lambda m: {"config": config(ADAMW)},
        lambda m: {"config": config(ADAMW), "model_parameters": m.parameters()},
        lambda m: {"config": config(ADAMW), "model_parameters": [{"params": list(m.parameters())}]},
        lambda m: {"config": config(ADAMW), "model_parameters": [{"params": p} for p in m.parameters()]},
        lambda m: {"config": config(ADAMW), "model_parameters": list(m.named_parameters())},
        lambda m: {"config": config(None), "optimizer": torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0)},
        lambda m: {"config": config(None), "optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0)},
        lambda m: {"config": config(None), "optimizer": torch.optim.Adam(m.parameters(), lr=0.1)},
        lambda m: {"config": config(None), "optimizer": pannier.DeepSpeedCPUAdam(m.parameters(), lr=0.1)},
        lambda m: {"config": config(None), "optimizer": pannier.FusedAdam(m.parameters(), lr=0.1, adam_w_mode=False)},
    ):
        module = model()
        engine = pannier.initialize(model=module, **make(module))[0]
        results.append(one_step(engine))
    assert all(equal(results[0], other) for other in results[1:])


def test_client_optimizer_comes_before_the_config() -> None:
    module = model()
    mine = torch.optim.SGD(module.parameters(), lr=0.5)
    section = {"type": "AdamW", "params": {"lr": "auto"}}
    engine, optimizer, _, _ = pannier.initialize(model=module, optimizer=mine, config=config(section))
    before = [param.detach().clone() for param in module.parameters()]
    one_step(engine)
    assert engine.optimizer_name() == "SGD" and optimizer.optimizer is mine
    assert optimizer.param_groups is mine.param_groups
    plain = model()
    plain(torch.ones(2, 3)).pow(2).mean().backward()
    for old, new, param in zip(before, module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(new, old - 0.5 * param.grad, rtol=0, atol=1e-7)


def test_class_of_the_described_optimizer() -> None:
    kinds = {
        ("Adam", False): pannier.FusedAdam,
        ("AdamW", True): pannier.DeepSpeedCPUAdam,
        ("Adagrad", False): torch.optim.Adagrad,
        ("Adagrad", True): pannier.DeepSpeedCPUAdagrad,
        ("Lion", False): pannier.FusedLion,
        ("Lion", True): pannier.DeepSpeedCPULion,
        ("SGD", True): torch.optim.SGD,
    }
    for (name, offload), kind in kinds.items():
        section = {"type": name, "params": {"lr": 0.1}}
        optimizer = pannier.initialize(model=model(), config=config(section, offload=offload))[1]
        assert type(optimizer.optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.1


def test_parameters_keep_their_identity() -> None:
    module = model()
    before = list(module.parameters())
    engine = pannier.initialize(model=module, config=config(ADAMW, dtype="bf16", offload=True))[0]
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert all(param.dtype is torch.bfloat16 for param in engine.parameters())


class Custom(torch.optim.AdamW):
    """Looks like AdamW, may do anything."""


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), ["RMSprop", "AdamW", "DeepSpeedCPUAdam"]),
        (lambda m: Custom(m.parameters()), ["Custom", "AdamW"]),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), ["amsgrad"]),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1, maximize=True), ["maximize"]),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1, differentiable=True), ["differentiable"]),
        (lambda m: torch.optim.SGD(model().parameters(), lr=1), ["not the model's"]),
        (lambda m: "AdamW", ["str"]),
        (lambda m: lambda params: 3, ["int"]),
    ],
)
def test_optimizer_that_cannot_be(make, parts: list[str]) -> None:
    module = model()
    with pytest.raises(pannier.ConfigError) as error:
        pannier.initialize(model=module, optimizer=make(module), config=config(None))
    assert all(part in str(error.value) for part in parts), str(error.value)
    pannier.initialize(model=module, config=config(ADAMW))


def test_an_optimizer_that_is_not_known_is_an_assertion_too() -> None:
    module = model()
    with pytest.raises(AssertionError, match="RMSprop is not supported"):  # As it is with DeepSpeed.
        pannier.initialize(model=module, optimizer=torch.optim.RMSprop(module.parameters()), config=config(None))


def test_groups_that_cannot_be() -> None:
    module = model()
    first = module[0].weight
    with pytest.raises(pannier.ConfigError, match=r"0\.weight"):
        pannier.initialize(
            model=module, config=config(ADAMW), model_parameters=[{"params": [first]}, {"params": [first]}]
        )
    with pytest.raises(pannier.ConfigError, match=r"0\.weight"), pytest.warns(UserWarning):
        pannier.initialize(model=module, config=config(ADAMW), model_parameters=[first, first])
    with pytest.raises(pannier.ConfigError, match="not the model's"):
        pannier.initialize(model=module, config=config(ADAMW), model_parameters=[nn.Parameter(torch.ones(1))])
    with pytest.raises(pannier.ConfigError):
        pannier.initialize(model=module, config=config(ADAMW), model_parameters=[])
    for param in module.parameters():
        param.requires_grad_(False)
    with pytest.raises(pannier.ConfigError, match="no trainable parameters"):
        pannier.initialize(model=module, config=config(ADAMW))


def test_models_that_cannot_be() -> None:
    with pytest.raises(pannier.ConfigError, match="needs a model"):
        pannier.initialize(config=config(ADAMW))
    with pytest.raises(AssertionError):
        pannier.initialize(config=config(ADAMW))
    with pytest.raises(pannier.ConfigError, match="Module"):
        pannier.initialize(model=lambda x: x, config=config(ADAMW))
    with pytest.raises(pannier.ConfigError, match="0.weight is on device meta"):
        pannier.initialize(model=model().to("meta"), config=config(ADAMW))
    sparse = nn.Module()
    sparse.w = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(pannier.ConfigError, match="w has layout torch.sparse_coo"):
        pannier.initialize(model=sparse, config=config(ADAMW))
    with pytest.raises(pannier.ConfigError, match="0.weight"):
        pannier.initialize(model=model().double(), config=config(ADAMW))
    with pytest.raises(pannier.ConfigError, match="mpu"):
        pannier.initialize(model=model(), config=config(ADAMW), mpu=object())


def test_unknown_optimizer_in_the_config() -> None:
    with pytest.raises(pannier.ConfigError, match="Adamm"):
        pannier.initialize(model=model(), config=config({"type": "Adamm", "params": {}}))


def test_left_over_auto() -> None:
    section = {"type": "AdamW", "params": {"lr": "auto"}}
    with pytest.raises(pannier.ConfigError, match=r"optimizer\.params\.lr"):
        pannier.initialize(model=model(), config=config(section))
    zero = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    pannier.initialize(model=model(), config=config(ADAMW, zero=zero))


def test_a_plan_that_cannot_fit_is_refused_before_anything_changes() -> None:
    module = model()
    before = [(param.data_ptr(), param.dtype) for param in module.parameters()]
    settings = config(ADAMW, dtype="bf16", pannier={"device_memory": "64 B"})
    with pytest.raises(pannier.OutOfMemoryError, match=r" out of memory\."):
        pannier.initialize(model=module, config=settings)
    assert before == [(param.data_ptr(), param.dtype) for param in module.parameters()]
    pannier.initialize(model=module, config=config(ADAMW))


def test_scheduler_that_raises_leaves_the_model_alone() -> None:
    module = model()

    def broken(optimizer: torch.optim.Optimizer) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pannier.initialize(model=module, config=config(ADAMW, dtype="fp16"), lr_scheduler=broken)
    assert module[0].weight.dtype is torch.float32
    pannier.initialize(model=module, config=config(ADAMW))


def test_training_data_that_cannot_be() -> None:
    module = model()
    with pytest.raises(pannier.ConfigError, match="Dataset"):
        pannier.initialize(model=module, config=config(ADAMW), training_data=3)
    pannier.initialize(model=module, config=config(ADAMW))


def test_buffers_keep_fp32_but_for_batch_norm_and_on_request() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module.register_buffer("table", torch.ones(3))
    for wish, want in ((None, torch.float32), ("bf16", torch.bfloat16)):
        more = {} if wish is None else {"data_types": {"buffer_dtype": wish}}
        engine = pannier.initialize(model=module, config=config(ADAMW, dtype="bf16", **more))[0]
        assert module.table.dtype is want and module[1].running_mean.dtype is torch.bfloat16
        assert module[1].num_batches_tracked.dtype is torch.int64
        engine.backward(engine(torch.randn(4, 3).bfloat16()).float().pow(2).mean())
        engine.step()
        engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_buffers_that_share_memory_still_do(dtype: str) -> None:
    module = model()
    table = torch.arange(12.0).view(4, 3)
    module.register_buffer("table", table)
    module.register_buffer("row", table[1])
    module.register_buffer("column", table[:, 2])
    module.register_buffer("bits", table.view(torch.int32)[2, 1:])
    module.frozen = nn.Parameter(table[3], requires_grad=False)
    module.register_buffer("apart", torch.ones(3))
    engine = pannier.initialize(model=module, config=config(ADAMW, dtype=dtype))[0]
    assert torch.equal(module.table, torch.arange(12.0).view(4, 3)) and module.table.is_contiguous()
    assert module.column.tolist() == [2, 5, 8, 11] and module.column.stride() == (3,)
    module.row.fill_(-1)
    module.column[0] = -2
    module.bits[0] = 0
    assert module.table.tolist() == [[0, 1, -2], [-1, -1, -1], [6, 0, 8], [9, 10, 11]]
    module.table.zero_()
    assert not module.row.any() and not module.column.any() and torch.equal(module.apart, torch.ones(3))
    # A frozen parameter that changes its type has memory of its own.
    assert module.frozen.dtype is getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype])
    assert module.frozen.tolist() == ([0, 0, 0] if dtype == "fp32" else [9, 10, 11])
    engine.destroy()
    module.row.fill_(5)
    assert module.table[1].tolist() == [5, 5, 5]


def test_a_buffer_that_shows_a_parameter_is_refused() -> None:
    """It would stay as it was while the parameter is trained."""
    model = nn.Linear(3, 3)
    model.register_buffer("row", model.weight.detach()[1])
    with pytest.raises(pannier.ConfigError, match="buffer row is a view of parameter weight"):
        pannier.initialize(model=model, config=config(ADAMW))
    model.row = model.row.clone()
    pannier.initialize(model=model, config=config(ADAMW))[0].destroy()


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 3)
    with pytest.raises(pannier.ConfigError, match="weight was made inside torch.inference_mode"):
        pannier.initialize(model=model, config=config(ADAMW))


def test_shared_memory_is_counted_once() -> None:
    plain, sharing = model(), model()
    plain.register_buffer("table", torch.zeros(1 << 20))
    sharing.register_buffer("table", torch.zeros(1 << 20))
    sharing.register_buffer("first_half", sharing.table[: 1 << 19])
    plans = [pannier.initialize(model=module, config=config(ADAMW))[0].plan() for module in (plain, sharing)]
    assert str(plans[0]) == str(plans[1])


def test_inputs_are_cast_only_with_auto_cast() -> None:
    seen = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x, nested=None):
            seen.append([x.dtype, *(value.dtype for value in (nested or {}).get("a", ()))])
            return (self.w * x).sum()

    for auto, want in ((False, torch.float32), (True, torch.float16)):
        settings = config(ADAMW, fp16={"enabled": True, "auto_cast": auto})
        module = Looks()
        engine = pannier.initialize(model=module, config=settings)[0]
        engine(torch.ones(2), nested={"a": (torch.ones(1), torch.ones(1, dtype=torch.int64))})
        assert seen.pop() == [want, want, torch.int64]
        engine.destroy()
        module(torch.ones(2))
        assert seen.pop() == [torch.float32]


def test_states_that_do_not_fit_change_nothing() -> None:
    module = model()
    mine = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(2, 3)).sum().backward()
    mine.step()
    held = mine.state[module[2].bias]
    good, held["exp_avg"] = held["exp_avg"], torch.zeros(7)
    with pytest.raises(pannier.ConfigError, match=r"exp_avg of parameter 2\.bias has shape \(7,\).*\(1,\)"):
        pannier.initialize(model=module, optimizer=mine, config=config(None, dtype="bf16"))
    assert all(param.dtype is torch.float32 for param in module.parameters()) and len(mine.state) == 4
    held["exp_avg"] = good
    engine = pannier.initialize(model=module, optimizer=mine, config=config(None))[0]
    assert torch.equal(pannier.safe_get_full_optimizer_state(module[2].bias, "exp_avg"), good)
    one_step(engine)


def test_failed_initialize_leaves_the_groups_alone() -> None:
    module = model()
    mine = torch.optim.AdamW(module.parameters(), lr=0.5)
    before = dict(mine.param_groups[0])
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    settings = config(None, scheduler=scheduler, pannier={"device_memory": "64 B"})
    with pytest.raises(pannier.OutOfMemoryError):
        pannier.initialize(model=module, optimizer=mine, config=settings)
    assert mine.param_groups[0] == before


def test_training_data_needs_a_batch_size() -> None:
    module = model()
    settings = {"train_micro_batch_size_per_gpu": "auto", "optimizer": ADAMW, "bf16": {"enabled": True}}
    data = torch.utils.data.TensorDataset(torch.ones(6, 3))
    with pytest.raises(pannier.ConfigError, match="training_data needs a train_micro_batch_size_per_gpu"):
        pannier.initialize(model=module, config=settings, training_data=data)
    assert module[0].weight.dtype is torch.float32
    pannier.initialize(model=module, config=config(ADAMW))


def test_gradients_from_before_are_cleared() -> None:
    module = model()
    module(torch.ones(2, 3)).sum().backward()
    engine = pannier.initialize(model=module, config=config(ADAMW))[0]
    assert all(param.grad is None for param in module.parameters())
    assert equal(one_step(engine), one_step(pannier.initialize(model=model(), config=config(ADAMW))[0]))


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_values_that_are_not_json() -> None:
    looped: dict = {}
    looped["a"] = looped
    for settings, message in (
        ({"optimizer": {"type": "Adam", "params": {"lr": torch.ones(3)}}}, r"optimizer\.params\.lr: wanted a number of at least 0, got \[1"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, object()]}}}, r"params\.betas\.1 .*object"),
        (looped, "nested too deeply"),
        ({**config(None), "optimizer": {}}, r"optimizer\.type is missing"),
        ({**config(None), "optimizer": {"type": None, "params": {"lr": 0.1}}}, r"optimizer\.type is missing"),
    ):
        with pytest.raises(pannier.ConfigError, match=message):
            pannier.initialize(model=model(), config=settings)
    section = {"type": "Adam", "params": {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.5), 0.75)}}
    assert pannier.initialize(model=model(), config=config(section))[0].get_lr() == [0.5]


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(deep(100_000))
    for given in (str(path), base64.urlsafe_b64encode(deep(100_000).encode()).decode()):
        with pytest.raises(pannier.ConfigError, match=r"(deep\.json|base64).*nested too deeply"):
            pannier.initialize(model=model(), config=given)


def test_base64_with_comments() -> None:
    text = "// mine\n" + json.dumps(config(ADAMW)) + " /* end */"
    engine = pannier.initialize(model=model(), config=base64.urlsafe_b64encode(text.encode()).decode())[0]
    assert engine.get_lr() == [0.1]


def test_keys_that_occur_twice_are_found_with_a_client_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"train_batch_size": 1, "optimizer": {"type": "Adam"}, "train_batch_size": 2}')
    module = model()
    with pytest.raises(pannier.ConfigError, match="train_batch_size: occurs twice|train_batch_size.*twice"):
        pannier.initialize(model=module, optimizer=torch.optim.Adam(module.parameters()), config=str(path))


def test_keys_without_effect_show_in_the_configuration_too() -> None:
    zero = {"stage": 2, "overlap_comm": True, "allgather_bucket_size": 5e7, "stage3_prefetch_bucket_size": "auto"}
    engine = pannier.initialize(model=model(), config={**config(ADAMW), "zero_optimization": zero})[0]
    assert zero.items() <= engine.config["zero_optimization"].items()
    assert engine.zero_overlap_comm() and engine.zero_allgather_bucket_size() == 50_000_000
    assert engine.zero_prefetch_bucket_size() == 50_000_000  # "auto" is the default.
