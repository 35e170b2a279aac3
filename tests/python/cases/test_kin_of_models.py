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
