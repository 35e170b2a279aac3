#!/usr/bin/env python3
"""Draws one traced step: a row for each place where something happens, a bar for each thing.

    ./dev run python scripts/plot_trace.py step.json --out step.png

step.json is what `"pannier": {"trace": "step.json"}` wrote.
"""

import argparse
import json
import pathlib
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

INK, MUTED, GRID = "#1b1f24", "#59636e", "#d8dee4"
# What a bar is, by its name without its number; anything else is grey.
COLORS = {
    "forward": "#9db8e8",
    "backward": "#5d87d6",
    "step": "#c9ced6",
    "wait for the decision": "#8a929e",
    "update": "#d1495b",
    "states": "#e8912d",
    "gradients": "#1f9e77",
    "parameters": "#9b59b6",
}
INNER = {"wait for the decision", "update", "unit"}  # Drawn thinner, over what they are a part of.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a .png, .svg or .pdf")
    arguments = parser.parse_args()
    events = json.loads(arguments.trace.read_text())["traceEvents"]
    title = next(event["args"]["name"] for event in events if event["name"] == "process_name")
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    used = [tid for tid in sorted(rows) if any(span["tid"] == tid for span in spans)]

    figure, axes = plt.subplots(figsize=(11, 0.9 + 0.62 * len(used)), dpi=150)
    kinds = set()
    for span in sorted(spans, key=lambda span: re.sub(r" \d+$", "", span["name"]) in INNER):
        kind = re.sub(r" \d+$", "", span["name"])
        if kind == "unit":
            axes.vlines(span["ts"] / 1e3, used.index(span["tid"]) - 0.38, used.index(span["tid"]) + 0.38, INK, linewidth=0.3)
            continue
        kinds.add(kind if kind in COLORS else "other")
        height = 0.4 if kind in INNER else 0.76
        axes.barh(
            used.index(span["tid"]), span["dur"] / 1e3, left=span["ts"] / 1e3, height=height,
            color=COLORS.get(kind, GRID), edgecolor="white", linewidth=0.25,
        )  # fmt: skip
    axes.set_yticks(range(len(used)), [rows[tid] for tid in used])
    axes.invert_yaxis()
    axes.set_xlim(0, max(span["ts"] + span["dur"] for span in spans) / 1e3)
    axes.set_xlabel("milliseconds since the step before returned", color=MUTED, fontsize=9)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    legend = [Patch(color=COLORS.get(kind, GRID), label=kind) for kind in [*COLORS, "other"] if kind in kinds]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=8, labelcolor=MUTED)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(arguments.out)


if __name__ == "__main__":
    main()
