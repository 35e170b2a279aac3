"""Backwards that fail, and calls out of order: nothing of them is ever applied, and the caller is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import pannier


class Dot(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


class Boom(torch.autograd.Function):
    """Backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")


def engine_of(model: torch.nn.Module, gas: int = 1, **extra: Any) -> pannier.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 2, **extra.pop("zero", {})},
        **extra,
    }
    return pannier.initialize(model=model, config=config)[0]


X = torch.tensor([4.0])


def test_a_failure_that_took_earlier_micro_batches_with_it_is_said_by_step() -> None:
    engine = engine_of(Dot(), gas=4)
    for _ in range(2):
        engine.backward(engine(X))
        engine.step()
    with pytest.raises(RuntimeError, match="boom"):
        engine.backward(Boom.apply(engine(X)))
    engine.backward(engine(X))
    with pytest.raises(pannier.ConfigError, match="a backward that failed"):
        engine.step()
    for _ in range(4):
        engine.backward(engine(X))
        engine.step()
    assert engine.global_steps == 1 and engine.module.w.item() == -4.0


def test_a_failure_of_a_single_micro_batch_can_be_tried_again() -> None:
    engine = engine_of(Dot())
    with pytest.raises(RuntimeError, match="boom"):
        engine.backward(Boom.apply(engine(X)))
    engine.backward(engine(X))
    engine.step()
    assert engine.module.w.item() == -4.0


@pytest.mark.parametrize("scaled", [True, False])
def test_a_failed_backward_of_the_callers_own_is_not_applied(scaled: bool) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor([0.0]))
            self.b = torch.nn.Parameter(torch.tensor([0.0]))

    engine = engine_of(Two())
    loss = (Boom.apply(engine.module.a * 2) * engine.module.b + engine.module.b * 3).sum()
    with pytest.raises(RuntimeError, match="boom"):
        (engine.scale(loss) if scaled else loss).backward()
    with pytest.raises(pannier.ConfigError, match="a backward that failed|before backward"):
        engine.step()
    assert engine.module.a.item() == 0 and engine.module.b.item() == 0
    (engine.module.a * 2 + engine.module.b * 3).sum().backward()
    engine.step()
    assert engine.module.a.item() == -2 and engine.module.b.item() == -3


def test_a_refused_gradient_drops_the_window() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([0.0]))
            self.words = torch.nn.Embedding(4, 2, sparse=True)

    engine = engine_of(Words())
    (engine.module.w * X).sum().backward()
    with pytest.raises(ValueError, match=r"the gradient of words\.weight is sparse"):
        engine.module.words(torch.tensor([1])).sum().backward()
    before = engine.module.w.item()
    with pytest.raises(pannier.ConfigError, match="a backward that failed"):
        engine.step()
    assert engine.module.w.item() == before


def test_out_of_memory_while_a_backward_ends_drops_the_window() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
    engine = engine_of(model, gas=2, bf16={"enabled": True}, zero={"reduce_bucket_size": 5000})
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    before = [param.clone() for param in model.parameters()]
    loss = engine(x).float().sum()
    # Room for the gradients of backward, not for the fp32 sums that are made when it ends.
    cap = json.loads(torch.ops.pannier.device_memory())["current"] + 3 * 2 * 256 * 257 + 200_000
    torch.ops.pannier.add_device_memory_cap(cap)
    try:
        with pytest.raises(pannier.OutOfMemoryError):
            engine.backward(loss)
    finally:
        torch.ops.pannier.remove_device_memory_cap(cap)
    with pytest.raises(pannier.ConfigError, match="a backward that failed"):
        engine.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_every_step_needs_a_backward() -> None:
    engine = engine_of(Dot(), gas=4)
    engine.backward(engine(X))
    engine.step()
    with pytest.raises(pannier.ConfigError, match="step\\(\\) before backward"):
        engine.step()


def test_a_converted_parameter_is_hooked_again_or_said() -> None:
    engine = engine_of(Dot())
    engine.module.double()
    engine.module.float()
    engine.backward(engine(X))
    engine.step()
    assert engine.module.w.item() == -4.0
    loss = engine(X)
    engine.module.double()
    engine.module.float()
    engine.backward(loss)
    with pytest.raises(pannier.ConfigError, match="parameter w (was converted or replaced|holds a gradient in .grad)"):
        engine.step()
    engine.backward(engine(X))
    engine.step()
    assert engine.module.w.item() == -8.0


def test_calls_inside_a_backward_are_refused() -> None:
    engine = engine_of(Dot())
    for call in (engine.step, engine.drop_gradients):
        loss = engine.module.w * X
        loss.register_hook(lambda grad, call=call: call())
        with pytest.raises(pannier.ConfigError, match="inside a backward"):
            engine.backward(loss.sum())
    engine.backward(engine(X))
    engine.step()
    assert engine.module.w.item() == -4.0


@pytest.mark.parametrize("home", ["none", "cpu"])
def test_replaced_data_never_overwrites_what_was_kept(home: str) -> None:
    engine = engine_of(Dot(), zero={"offload_optimizer": {"device": home}})
    weight = engine.module.w
    kept = weight.data
    weight.data = torch.tensor([100.0])
    pannier.safe_get_full_fp32_param(weight)
    assert kept.item() == 0.0
    engine.backward(engine(X))
    with pytest.raises(pannier.ConfigError, match="data of parameter w was replaced while"):
        engine.step()
    weight.data = kept
    engine.drop_gradients()
    engine.backward(engine(X))
    engine.step()
    assert weight.item() == -4.0


@pytest.mark.parametrize("home", ["none", "cpu"])
def test_transposed_data_counts_as_an_edit(home: str) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    engine = engine_of(model, zero={"offload_optimizer": {"device": home}})
    model.weight.data = model.weight.data.t()
    engine.backward((engine(torch.tensor([[1.0, 10.0]])) * torch.tensor([[1.0, 100.0]])).sum())
    engine.step()
    assert model.weight.tolist() == [[0.0, -7.0], [-98.0, -996.0]]


def test_an_edit_survives_an_error_about_another_parameter() -> None:
    model = torch.nn.ModuleDict({"a": Dot(), "b": Dot()})
    engine = engine_of(model, zero={"offload_optimizer": {"device": "cpu"}})
    with torch.no_grad():
        model["a"].w.fill_(100.0)
    model["b"].w.data = torch.ones(3)
    engine.backward(model["a"](X))
    with pytest.raises(pannier.ConfigError, match="b.w was changed behind the engine"):
        engine.step()
    model["b"].w.data = torch.tensor([0.0])
    engine.drop_gradients()
    engine.backward(model["a"](X))
    engine.step()
    assert model["a"].w.item() == 96.0


def test_two_parameters_in_one_memory_are_refused() -> None:
    model = torch.nn.ModuleDict({"a": Dot(), "b": Dot()})
    model["b"].w = torch.nn.Parameter(model["a"].w.data)
    with pytest.raises(pannier.ConfigError, match="parameters a.w and b.w share memory"):
        engine_of(model)


def test_a_cap_ends_with_its_own_engine_only() -> None:
    current = json.loads(torch.ops.pannier.device_memory())["current"]
    first = engine_of(Dot(), pannier={"device_memory": current + 2**20})
    second = engine_of(Dot(), pannier={"device_memory": current + 2**22})
    assert first.memory_stats()["device"]["cap"] == current + 2**20
    second.destroy()
    with pytest.raises(pannier.OutOfMemoryError):
        torch.empty(2**21, dtype=torch.uint8)
    first.destroy()
    torch.empty(2**21, dtype=torch.uint8)
