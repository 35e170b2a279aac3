"""Partitioned weights outlive their engine: they are read, trained again and saved as if it had never been."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pannier
import ranks
from reference import OPTIMIZERS, config

ZERO = {"stage3_param_persistence_threshold": 0}


class Mixed(nn.Module):
    """Weights of odd sizes, one of another order in memory, one frozen, one tied, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.frozen = nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.tiny, self.empty = nn.Parameter(torch.tensor([-0.0])), nn.Parameter(torch.empty(0, 2))
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(self.b((self.a(x) + self.again(x)).tanh())) @ self.turned
        return y.float().pow(2).mean() + self.tiny.sum() * 0 + self.empty.sum()


def start(model: nn.Module, dtype: str = "fp32", stage: int = 3, home: str = "cpu") -> pannier.Engine:
    zero: dict[str, Any] = {**ZERO, "stage": stage}
    if stage == 3 and home != "none":
        zero["offload_param"] = {"device": "cpu"}
    settings = config(OPTIMIZERS["AdamW"][0], stage=stage, offload=True, dtype=dtype, zero=zero)
    return pannier.initialize(model=model, config={**settings, "pannier": {"collective_timeout": 30}})[0]


def step(engine: pannier.Engine, number: int) -> float:
    generator = torch.Generator().manual_seed(10 * number + engine.global_rank)
    dtype = next(engine.module.parameters()).dtype
    loss = engine(torch.randn(2, 5, generator=generator).to(dtype))
    engine.backward(loss)
    engine.step()
    return loss.item()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with pannier.zero.GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left) and left.keys() == right.keys()


def let_go(engine: pannier.Engine, how: str) -> None:
    if how == "destroy":
        engine.destroy()


def goes_on(rank: int, world: int, how: str, dtype: str, home: str) -> dict[str, bool]:
    """A second engine on what a first one left trains as one on a copy of it."""
    result = {}
    for stage in (3, 2):
        model = Mixed()
        engine = start(model, dtype, home=home)
        step(engine, 0)
        before = weights(model)
        let_go(engine, how)
        del engine
        gc.collect()
        result[f"{stage}: kept"] = same(weights(model), before)
        copy = Mixed().to(next(iter(before.values())).dtype)
        copy.load_state_dict({**before, "again.weight": before["a.weight"]})
        losses = []
        for each in (model, copy):
            again = start(each, dtype, stage, home)
            losses.append([*[step(again, number) for number in range(2)], str(weights(each))])
            let_go(again, how)
            del again
            gc.collect()
        result[f"{stage}: trained alike"] = losses[0] == losses[1]
    return result


def test_one_rank_has_its_model_back() -> None:
    for how in ("destroy", "collected"):
        model = Mixed()
        engine = start(model)
        step(engine, 0)
        before = weights(model)
        let_go(engine, how)
        del engine
        gc.collect()
        assert same({name: param.detach() for name, param in model.named_parameters()}, before)
        assert model(torch.ones(2, 5)).isfinite() and len(model.state_dict()) == len(Mixed().state_dict())
    assert all(goes_on(0, 1, "destroy", "bf16", "cpu").values())


@pytest.mark.parametrize(("how", "dtype", "home"), [("destroy", "bf16", "cpu"), ("collected", "fp32", "none")])
def test_ranks_go_on_with_the_model(how: str, dtype: str, home: str) -> None:
    for ended in ranks.run(__file__, "goes_on", 3, how, dtype, home):
        assert all(ended.result.values()), ended.result


def edited(rank: int, world: int) -> list[Any]:
    """Reading is refused in words, edits inside GatheredParameters count, and ranks may let go at different times."""
    model = Mixed()
    engine = start(model)
    step(engine, 0)
    if rank == 0:
        engine.destroy()
    dist.barrier()
    engine.destroy()
    text = ranks.error_of(lambda: model.a.weight.sum())
    with pannier.zero.GatheredParameters(model.a.weight, modifier_rank=1), torch.no_grad():
        model.a.weight.fill_(float(rank))
    found = weights(model)["a.weight"]
    return [text, found.unique().tolist()]


def test_edits_after_an_engine() -> None:
    for ended in ranks.run(__file__, "edited", 2):
        text, values = ended.result
        assert "whose engine has ended while it was partitioned" in text and "GatheredParameters" in text
        assert values == [1.0]


def test_weights_on_a_disk_are_gone_and_say_so(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(4, 4)
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {**ZERO, "stage": 3, "offload_optimizer": place, "offload_param": place}
    engine = pannier.initialize(model=model, config=config(OPTIMIZERS["AdamW"][0], stage=3, zero=zero))[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    state = model.state_dict()
    engine.destroy()
    with pytest.raises(RuntimeError, match="rested on a disk: take what you need, by state_dict"):
        model.weight.sum()
    assert state["weight"].isfinite().all()


if __name__ == "__main__":
    ranks.main({"goes_on": goes_on, "edited": edited})
