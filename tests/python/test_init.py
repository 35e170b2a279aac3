"""`zero.Init`: a model is built in shares, so that no rank ever holds it whole; the engine takes it from there."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import pannier
import ranks
from pannier import early
from test_ranks import digest
from test_stage_3 import STEPS, Tower, settings, tokens, weights

PROGRAMS: dict[str, ranks.Program] = {}
MESSAGE = "pannier.zero.Init has partitioned"


def program(body: ranks.Program) -> ranks.Program:
    PROGRAMS[body.__name__] = body
    return body


def build(rank: int, seed: int = 5) -> Tower:
    """On each rank from a seed of its own; what counts is rank 0's."""
    with pannier.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        return Tower(seed=seed + rank)


def train(model: Tower, rank: int, **options: Any) -> str:
    engine, _, _, _ = pannier.initialize(model=model, config=settings(**options))
    for step in range(STEPS):
        engine.backward(engine(tokens(step, rank)))
        engine.step()
    bits = digest([*weights(model).values()])
    engine.destroy()
    return bits


@program
def trained(rank: int, world: int) -> Any:
    """Pairs of digests: built whole and built in shares."""
    pairs = {}
    for stage, param_offload in ((1, False), (2, False), (3, False), (3, True)):
        zero = {"stage": stage}
        own = {"zero": zero, "param_offload": param_offload, "offload": True}
        pairs[f"stage {stage}, params {param_offload}"] = [
            train(Tower(), rank, **own),
            train(build(rank), rank, **own),
            train(converted(rank), rank, **own),
        ]
    return pairs


def converted(rank: int) -> Tower:
    model = Tower(seed=5 + rank)
    pannier.zero.Init(module=model)
    return model


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_model_built_in_shares_trains_as_one_built_whole(world: int) -> None:
    results = [ended.result for ended in ranks.run(__file__, "trained", world)]
    for result in results:
        for cell, bits in result.items():
            assert len(set(bits)) == 1, cell
    assert results == [results[0]] * world


@program
def access(rank: int, world: int) -> Any:
    whole, model = Tower(), build(rank)
    names = [name for name, _ in model.named_parameters()]
    result: dict[str, Any] = {
        "away": sum(early.is_away(param) for param in model.parameters()),
        "all": len(names),
        "shapes": [list(param.shape) for param in model.parameters()] == [list(param.shape) for param in whole.parameters()],
        "read": ranks.error_of(lambda: model.shift.sum().item()),
        "forward": ranks.error_of(lambda: model(tokens(0, 0))),
        "tied": model.side.weight is model.embed.weight,
    }
    params = list(model.parameters())
    with pannier.zero.GatheredParameters(params):
        result["values"] = all(torch.equal(a, b) for a, b in zip(params, whole.parameters(), strict=True))
        with pannier.zero.GatheredParameters(params[:1]):
            result["nested"] = params[0].sum().item() == next(iter(whole.parameters())).sum().item()
        result["still whole"] = not early.is_away(params[0])
    result["away again"] = sum(early.is_away(param) for param in params)
    with pannier.zero.GatheredParameters([model.shift], modifier_rank=world - 1):
        if rank == world - 1:
            with torch.no_grad():
                model.shift.fill_(3.0)
    with pannier.zero.GatheredParameters([model.shift]):
        result["edited"] = bool((model.shift == 3.0).all())
    engine, _, _, _ = pannier.initialize(model=model, config=settings())
    result["kept"] = [early.is_partitioned(param) for param in params].count(True)
    result["given"] = bool((pannier.safe_get_full_fp32_param(model.shift) == 3.0).all())
    with pannier.zero.GatheredParameters([model.blocks[0].frozen.weight]):
        result["frozen"] = bool(torch.equal(model.blocks[0].frozen.weight, whole.blocks[0].frozen.weight))
    engine.destroy()
    return result


def test_parameters_in_shares_are_whole_where_they_are_gathered_and_refuse_elsewhere() -> None:
    for ended in ranks.run(__file__, "access", 2):
        result = ended.result
        assert result["away"] == result["away again"] == result["all"] > 20
        for name in ("read", "forward"):
            assert MESSAGE in result[name], result[name]
        for name in ("shapes", "tied", "values", "nested", "still whole", "edited", "given", "frozen"):
            assert result[name], name
        assert result["kept"] == 0


class Sets(torch.nn.Module):
    """A model that initializes the weights of its parts, as most do."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.Linear(7, 5))
        self.head = torch.nn.Linear(5, 3)
        self.value = value
        self.apply(self._set)

    def _set(self, part: torch.nn.Module) -> None:
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.constant_(part.weight, self.value)
            part.bias.data.zero_()


@program
def applied(rank: int, world: int) -> Any:
    apply = torch.nn.Module.apply
    with pannier.zero.Init(), pannier.zero.Init():
        model = Sets(2.0 + rank)
    params = list(model.parameters())
    result = [sum(early.is_away(param) for param in params), torch.nn.Module.apply is apply]
    with pannier.zero.GatheredParameters(params):
        result.append([float(param.float().mean()) for param in params])
    return result


def test_models_initialize_their_parts_and_rank_0s_values_count() -> None:
    for ended in ranks.run(__file__, "applied", 2):
        assert ended.result == [6, True, [2.0, 0.0] * 3]


@program
def memory(rank: int, world: int) -> Any:
    def current() -> int:
        return json.loads(torch.ops.pannier.device_memory())["current"]

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(16):
                self.add_module(f"layer{number}", torch.nn.Linear(512, 512, bias=False))

    torch.ops.pannier.reset_device_peak()
    before = current()
    with pannier.zero.Init():
        model = Stack()
    held = current() - before
    peak = json.loads(torch.ops.pannier.device_memory())["peak"] - before
    del model
    return [held, peak]


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_its_share_while_the_model_is_built(world: int) -> None:
    layer = 4 * 512 * 512
    for ended in ranks.run(__file__, "memory", world):
        held, peak = ended.result
        assert held <= 16 * layer / world + layer, "and what the last exchange may still hold"
        assert peak <= held + 3 * layer, "one layer, its values on the way, and its share"


def test_with_one_rank_nothing_is_different() -> None:
    with pannier.zero.Init():
        model = torch.nn.Linear(4, 4)
    assert not early.is_partitioned(model.weight)
    assert torch.isfinite(model(torch.ones(1, 4))).all()


if __name__ == "__main__":
    ranks.main(PROGRAMS)
