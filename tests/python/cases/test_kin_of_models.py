"""Relatives of the cases about models: what can't be managed is named, and what can is taken as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import pannier
from case_models import Dot, cfg, run, start, weight

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def wrapped(model: nn.Module) -> nn.Module:
    """As DistributedDataParallel(model), which wants a process group."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


def of_two_tensors() -> nn.Module:
    model = Dot()
    model.w = nn.Parameter(TwoTensor(torch.ones(1), torch.ones(1)))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(4)), r"parameter 0\.weight has no shape yet: a lazy module"),
        (of_two_tensors, r"parameter w is a TwoTensor, which has no memory of its own"),
        (lambda: wrapped(Dot()), r"the model is wrapped in DistributedDataParallel.*give initialize\(\) the module that"),
        (lambda: nn.Sequential(wrapped(Dot())), r"module 0 is wrapped in DistributedDataParallel"),
    ],
)
def test_models_that_cannot_be_managed(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(pannier.ConfigError, match=message):
        start(make(), cfg())


def test_groups_may_hold_a_momentum_for_the_callers_own_use() -> None:
    model = Dot()
    groups = [{"params": [model.w], "momentum": 0.9}]
    engine = start(model, cfg(), model_parameters=groups)
    run(engine, [[4.0]])
    assert weight(engine) == pytest.approx([-0.8], abs=1e-6)


class Nested(Dot):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch["inputs"][0])


def test_auto_sizes_of_a_nested_first_batch() -> None:
    config = {**cfg(), "train_micro_batch_size_per_gpu": "auto"}
    engine = start(Nested(), config)
    engine.backward(engine({"name": "x", "inputs": (torch.ones(3), torch.ones(7))}))
    engine.step()
    assert engine.get_batch_info() == (3, 3, 1)


class Shared(nn.Module):
    """Two parameters of one memory."""

    def __init__(self, first: Callable[[torch.Tensor], torch.Tensor], second: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        memory = torch.arange(8.0)
        self.p, self.q = nn.Parameter(first(memory)), nn.Parameter(second(memory))

    def forward(self) -> torch.Tensor:
        return self.p.sum() + 2 * self.q.sum()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda memory: memory[::2], lambda memory: memory[:3]),
        (lambda memory: memory[1::2], lambda memory: memory[::3]),
        (lambda memory: memory.view(2, 4), lambda memory: memory.view(2, 4)[:, 1:3]),
        (lambda memory: memory.view(2, 4), lambda memory: memory.view(4, 2).t()),
    ],
)
def test_parameters_that_share_some_of_their_memory_are_refused(
    first: Callable[[torch.Tensor], torch.Tensor], second: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for one, other in ((first, second), (second, first)):
        with pytest.raises(pannier.ConfigError, match="parameters [pq] and [pq] share memory but are two parameters"):
            start(Shared(one, other), cfg())


def test_parameters_between_each_other_share_nothing() -> None:
    model = Shared(lambda memory: memory.view(2, 4)[:, :2], lambda memory: memory.view(2, 4)[:, 2:])
    engine = start(model, cfg(opt=SGD))
    engine.backward(engine())
    engine.step()
    assert model.p.tolist() == [[-1.0, 0.0], [3.0, 4.0]] and model.q.tolist() == [[0.0, 1.0], [4.0, 5.0]]
