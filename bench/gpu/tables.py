"""The rows as a markdown table, and as one JSON file."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

Row = dict[str, Any]

_HEADINGS = (
    "work",
    "contestant",
    "s a step (least to most)",
    "mean s",
    "of no offload",
    "peak GiB (reserved)",
    "whole run's peak",
    "host GiB",
    "host bytes a parameter",
    "start-up s",
    "loss, first to last",
    "note",
)


def markdown(rows: list[Row]) -> str:
    """A line for each row; one that failed gives its reason."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|" + "---|" * len(_HEADINGS)]
    lines += ["| " + " | ".join(_cells(row, _base_of(row, rows))) + " |" for row in rows]
    return "\n".join(lines)


def kept(row: Row, base: Row | None) -> float | None:
    """The share of the speed without offload that `row` keeps."""
    if base is None or "seconds" not in base or "seconds" not in row:
        return None
    return base["seconds"] / row["seconds"]


def write(path: pathlib.Path, rows: list[Row], **values: Any) -> None:
    """Replaces the file in one go, so that a run that is cut short leaves all the rows it had."""
    for row in rows:
        share = kept(row, _base_of(row, rows))
        if share is not None:
            row["share_of_no_offload"] = round(share, 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps({**values, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file that `write` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def _base_of(row: Row, rows: list[Row]) -> Row | None:
    # A work that offloads parameters too is the same work for a contestant that offloads nothing.
    work = row["work"].removeprefix("zero3-")
    found = [base for base in rows if base["who"] == "torch" and base["work"].removeprefix("zero3-") == work]
    return found[0] if found else None


def _cells(row: Row, base: Row | None) -> list[str]:
    if "reason" in row:
        reason = row["reason"].replace("|", "/")
        return [row["work"], row["who"], *[""] * (len(_HEADINGS) - 3), reason]
    share = kept(row, base)
    least, most = row["seconds_spread"]
    return [
        row["work"],
        row["who"],
        f"{row['seconds']:.3f} ({least:.3f} to {most:.3f})",
        f"{row['seconds_mean']:.3f}",
        "" if share is None else f"{100 * share:.0f} %",
        f"{_gib(row['device_peak_gib'])} ({_gib(row['device_reserved_gib'])})",
        _gib(row["device_run_peak_gib"]),
        _gib(row["host_used_gib"]),
        _host_bytes_per_parameter(row, base),
        f"{row['start_up_seconds']:.1f}",
        f"{row['first_loss']:.3f} to {row['last_loss']:.3f}",
        _note(row),
    ]


def _note(row: Row) -> str:
    budget = row["device_memory_nbytes"]
    given = [] if budget is None else [f"device_memory {budget / 1024**3:.1f} GiB"]
    if "save_seconds" in row:
        gb = f"save {row['save_gb_per_second']:.2f} GB/s, load {row['load_gb_per_second']:.2f} GB/s"
        given.append(f"{gb}, {row['checkpoint_nbytes'] / 1e9:.1f} GB, {row['load_host_gib']:.1f} GiB more to load")
    return "; ".join([row["note"], *given] if row["note"] else given)


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _host_bytes_per_parameter(row: Row, base: Row | None) -> str:
    # Beyond what plain torch takes, which is its libraries and the driver.
    if base is None or "host_used_gib" not in base:
        return ""
    return f"{(row['host_used_gib'] - base['host_used_gib']) * 1024**3 / row['parameters']:.1f}"
