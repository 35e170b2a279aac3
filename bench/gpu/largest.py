"""The largest model that a contestant trains under a budget of device memory: bisects over numbers of layers."""

from __future__ import annotations

import pathlib
from typing import Any

from gpu import tables
from gpu.attempts import Limits, attempt

STEPS = ["--warm-up", "1", "--steps", "2"]


def search(who: str, layers: list[int], options: list[str], limits: Limits, rows: list[tables.Row]) -> dict[str, Any]:
    """Tries few of `layers`, which ascend, as what trains also trains with fewer; appends each attempt to `rows`."""
    works, fails = -1, len(layers)
    best: tables.Row | None = None
    while fails - works > 1:
        middle = (works + fails) // 2
        row = attempt(who, f"7b-{layers[middle]}l-4k", options, limits) | {"layers": layers[middle]}
        rows.append(row)
        if row.get("reason", "").startswith("not run"):
            break
        if "reason" in row:
            fails = middle
        else:
            works, best = middle, row
    return {
        "who": who,
        "layers": None if best is None else best["layers"],
        "parameters": None if best is None else best["parameters"],
        "seconds": None if best is None else best["seconds"],
        "device_run_peak_gib": None if best is None else best["device_run_peak_gib"],
        "host_used_gib": None if best is None else best["host_used_gib"],
        "least_that_failed": layers[fails] if fails < len(layers) else None,
        "complete": fails - works == 1,
    }


def run(whos: list[str], layers: list[int], budget_gib: float, limits: Limits, out: pathlib.Path) -> None:
    """Searches for each contestant, and prints and writes as it goes."""
    rows: list[tables.Row] = []
    found = []
    for who in whos:
        options = [*STEPS, "--device-limit-gib", str(budget_gib)]
        if who.startswith("pannier"):
            options += ["--device-memory-gib", str(budget_gib)]
        found.append(search(who, sorted(layers), options, limits, rows))
        tables.write(out, rows, mode="largest", budget_gib=budget_gib, largest=found)
    print(tables.markdown(rows))
    print(f"\nThe largest model under {budget_gib:g} GiB of device memory:\n\n{markdown(found)}", flush=True)


def markdown(found: list[dict[str, Any]]) -> str:
    """A line for each contestant."""
    lines = [
        "| contestant | layers | parameters | s a step | peak GiB | host GiB | bytes a parameter | fails with |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        fails = f"{one['least_that_failed'] or ''}{'' if one['complete'] else ' (search cut short)'}"
        if one["layers"] is None:
            lines.append(f"| {one['who']} | none | | | | | | {fails} |")
            continue
        per_parameter = one["host_used_gib"] * 1024**3 / one["parameters"]
        peak = "" if one["device_run_peak_gib"] is None else f"{one['device_run_peak_gib']:.1f}"
        lines.append(
            f"| {one['who']} | {one['layers']} | {one['parameters'] / 1e9:.2f} B | {one['seconds']:.2f} | {peak} | "
            f"{one['host_used_gib']:.1f} | {per_parameter:.1f} | {fails} |"
        )
    return "\n".join(lines)
