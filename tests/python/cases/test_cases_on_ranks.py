"""The handed cases on two and on four ranks, in every stage and home."""

from __future__ import annotations

import functools

import pytest

import ranks
from rank_cases import CASES, chosen_cases


ON_FOUR = ["27"]


@functools.cache
def results(world: int, *numbers: str) -> list[dict[str, str]]:
    return [ended.result for ended in ranks.run(__file__, "chosen_cases", world, *numbers)]


@pytest.mark.parametrize("number", [f"case_{number}" for number in sorted(CASES)])
def test_on_two_ranks(number: str) -> None:
    require_right(number.removeprefix("case_"), 2, sorted(CASES))


@pytest.mark.parametrize("number", [f"case_{number}" for number in ON_FOUR])
def test_on_four_ranks(number: str) -> None:
    require_right(number.removeprefix("case_"), 4, ON_FOUR)


def require_right(number: str, world: int, numbers: list[str]) -> None:
    for rank, result in enumerate(results(world, *numbers)):
        assert not result[number], f"rank {rank}: {result[number]}"


if __name__ == "__main__":
    ranks.main({"chosen_cases": chosen_cases})
