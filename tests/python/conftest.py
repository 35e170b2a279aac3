"""Prints one row a handed case at the end of a run, by the number in its tests' names."""

from __future__ import annotations

import collections
import gc
import re
from typing import Any

import pytest

_CASE = re.compile(r"case_(\d\d)")
_outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


def pytest_collection_finish() -> None:
    """Tests collect garbage often; what was imported is none."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts the outcomes of each case."""
    found = _CASE.search(report.nodeid)
    if found and (report.when == "call" or report.outcome != "passed"):
        _outcomes[found.group(1)][report.outcome] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table."""
    if not _outcomes:
        return
    terminalreporter.section("handed cases")
    terminalreporter.write_line(f"{'case':>6} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for number in sorted(_outcomes):
        counts = _outcomes[number]
        terminalreporter.write_line(
            f"{number:>6} {counts['passed']:>7} {counts['failed']:>7} {counts['skipped']:>8}"
        )
