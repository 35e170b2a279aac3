"""Relatives of the handed cases on three ranks, over which nothing divides evenly."""

from __future__ import annotations

import functools

import pytest

import ranks
from kin_on_ranks import KIN, all_kin


@functools.cache
def results() -> list[dict[str, str]]:
    return [ended.result for ended in ranks.run(__file__, "all_kin", 3)]


@pytest.mark.parametrize("name", sorted(KIN))
def test_on_ranks(name: str) -> None:
    for rank, result in enumerate(results()):
        assert not result[name], f"rank {rank}: {result[name]}"


if __name__ == "__main__":
    ranks.main({"all_kin": all_kin})
