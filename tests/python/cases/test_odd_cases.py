"""Models and loops that went wrong for people elsewhere, on one rank and on two, in every kind of cell."""

from __future__ import annotations

import functools
import traceback

import pytest

import ranks
from odd_cases import BODIES, CELLS


@functools.cache
def results(world: int) -> list[dict[str, str]]:
    return [ended.result for ended in ranks.run(__file__, "all_bodies", world)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", BODIES)
def test_it_trains_as_plain_torch_does(name: str, world: int) -> None:
    for rank, result in enumerate(results(world)):
        assert not result[name], f"rank {rank}: {result[name]}"


def all_bodies(rank: int, world: int) -> dict[str, str]:
    """What each came to; "" is right. One that failed on one rank may end the others too."""
    found = {}
    for name, body in BODIES.items():
        found[name] = ""
        for cell in CELLS[world]:
            try:
                body(rank, world, cell)
            except Exception:
                found[name] += f"{cell}: {traceback.format_exc()}"
    return found


if __name__ == "__main__":
    ranks.main({"all_bodies": all_bodies})
