"""Ranks that take different branches: no hang, and at stage 3 an error that names what each rank wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pannier
import ranks
from case_models import Dot, cfg, start, weight
from pannier.units import LEAF

QUICK = {"pannier": {"collective_timeout": 10}}


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Dot((0.0,)), Dot((0.0,))

    def forward(self, way: str, x: float) -> torch.Tensor:
        one = torch.tensor([x])
        return sum(getattr(self, name)(one) for name in way)


def settings(stage: int, home: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
    if home == "param":
        zero["offload_param"] = {"device": "cpu"}
    return cfg(stage=stage, dev="none" if home == "none" else "cpu", zero=zero, **QUICK)


def step(engine: pannier.Engine, way: str, x: float) -> None:
    engine.backward(engine(way, x))
    engine.step()


def gradients(rank: int, world: int) -> Any:
    """Stages 1 and 2: rank 0 uses only a, rank 1 only b; then rank 0 calls a twice; then the branches swap."""
    results = []
    for stage, home in ((0, "none"), (1, "none"), (1, "cpu"), (2, "none"), (2, "cpu")):
        engine = start(Branches(), settings(stage, home))
        step(engine, "a" if rank == 0 else "b", 4.0 if rank == 0 else 6.0)
        first = weight(engine, "a.w") + weight(engine, "b.w")
        engine.destroy()
        engine = start(Branches(), settings(stage, home))
        step(engine, "aa" if rank == 0 else "a", 2.0)  # The mean of 4 and 2.
        twice = weight(engine, "a.w")
        for way in ("ab", "ba"):
            step(engine, way[rank], 1.0)
        results.append([first, twice])
        engine.destroy()
    return results


def test_stages_below_3_average_over_all_ranks() -> None:
    for ended in ranks.run(__file__, "gradients", 2):
        for first, twice in ended.result:
            assert first == pytest.approx([-2 / 3, -0.75], abs=1e-6)
            assert twice == pytest.approx([-0.75], abs=1e-6)


def partitioned(rank: int, world: int, home: str, kind: str) -> Any:
    engine = start(Branches(), settings(3, home))
    try:
        if kind == "other":
            step(engine, "a" if rank == 0 else "b", 4.0 if rank == 0 else 6.0)
        elif kind == "twice":
            step(engine, "aa" if rank == 0 else "a", 2.0)
        else:  # The same on all ranks, but another way than before.
            for way in ("ab", "a", "b", "ba"):
                step(engine, way, 1.0)
    except pannier.CollectiveError as error:
        return str(error)
    return weight(engine, "a.w") + weight(engine, "b.w")


@pytest.mark.parametrize("home", ["none", "cpu", "param"])
def test_stage_3_names_what_ranks_wanted(home: str) -> None:
    ends = [ended.result for ended in ranks.run(__file__, "partitioned", 2, home, "other")]
    assert all("a.w" in str(end) or "b.w" in str(end) for end in ends), ends
    ends = [ended.result for ended in ranks.run(__file__, "partitioned", 2, home, "twice")]
    assert all("a.w" in str(end) or end == pytest.approx([-0.75, 0.0], abs=1e-6) for end in ends), ends
    stale, other = (ended.result for ended in ranks.run(__file__, "partitioned", 2, home, "stale"))
    assert stale == other and all(value < 0 for value in stale)


def leaf(rank: int, world: int, home: str) -> Any:
    """The way out at stage 3: a leaf is whole as one, whichever of its parts run."""
    model = Branches()
    setattr(model, LEAF, True)
    engine = start(model, settings(3, home))
    step(engine, "a" if rank == 0 else "b", 4.0 if rank == 0 else 6.0)
    return weight(engine, "a.w") + weight(engine, "b.w")


@pytest.mark.parametrize("home", ["none", "param"])
def test_leaves_take_any_branch(home: str) -> None:
    for ended in ranks.run(__file__, "leaf", 2, home):
        assert ended.result == pytest.approx([-2 / 3, -0.75], abs=1e-6)


if __name__ == "__main__":
    ranks.main({body.__name__: body for body in (gradients, partitioned, leaf)})
