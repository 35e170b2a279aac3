"""Alternating measurements of several contestants in one process, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable


def alternate(contestants: dict[str, Callable[[], object]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; the order turns round by round."""
    names = list(contestants)
    for _ in range(warm_up):
        for name in names:
            contestants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], over: str, under: str) -> tuple[float, float, float]:
    """Median, least and greatest of the round-by-round ratio of two contestants' times."""
    ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def report(**values: object) -> None:
    """Prints one JSON line."""
    print(json.dumps(values), flush=True)
