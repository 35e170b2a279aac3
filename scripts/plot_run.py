#!/usr/bin/env python3
"""Draws what training runs recorded: memory over time by owner, and loss.

    ./dev run python scripts/plot_run.py --out plots RUN...

A RUN is a JSON file as examples/demo/train_once.py writes it, or a file of JSON lines, one a step, as
`pannier train --metrics` writes it. Writes loss.png, and memory.png for the runs that recorded memory over time.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

OWNERS = ["parameters", "optimizer states", "gradients", "activations"]  # From the bottom of the stack to its top.
OWNER_COLORS = ["#2a6fdb", "#e8912d", "#1f9e77", "#9b59b6"]
RUN_COLORS = ["#2a6fdb", "#d1495b", "#1f9e77", "#e8912d"]
INK, MUTED, GRID = "#1b1f24", "#59636e", "#d8dee4"
GIB = 2**30


def read_run(path: pathlib.Path) -> dict:
    """A run as {"title", "steps": [{"step", "loss", ...}], "timeline": [[seconds, {owner: bytes}], ...]}, and perhaps
    "steps_are", the name of the axis over steps."""
    text = path.read_text()
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        record = {"steps": [json.loads(line) for line in text.splitlines() if line.strip()]}
    if "steps" not in record:  # A file of one line.
        record = {"steps": [record]}
    return {"title": path.stem, "timeline": []} | record


def style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.yaxis.label.set_color(MUTED)
    axes.xaxis.label.set_color(MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def first_steps(run: dict, count: int) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds and GiB by owner over the run's first `count` steps, the state at the end repeated at the edge."""
    end = run["steps"][min(count, len(run["steps"])) - 1]["ended"]
    samples = [sample for sample in run["timeline"] if sample[0] <= end]
    times = [seconds for seconds, _ in samples] + [end]
    return times, {owner: [by_owner.get(owner, 0) / GIB for _, by_owner in [*samples, samples[-1]]] for owner in OWNERS}


def draw_memory(axes: Axes, run: dict, steps: int, cap: float | None) -> None:
    times, sizes = first_steps(run, steps)
    bottom = [0.0] * len(times)
    for owner, color in zip(OWNERS, OWNER_COLORS, strict=True):
        top = [low + size for low, size in zip(bottom, sizes[owner], strict=True)]
        axes.fill_between(times, bottom, top, step="post", color=color, linewidth=0, alpha=0.9)
        bottom = top
    for step in run["steps"][: steps - 1]:
        axes.axvline(step["ended"], color="white", linewidth=1.0)
    style(axes, run["title"])
    axes.set_xlim(0, times[-1])
    axes.set_xticks(
        [(step["began"] + step["ended"]) / 2 for step in run["steps"][:steps]],
        [f"step {step['step']}\n{step['ended'] - step['began']:.2f} s" for step in run["steps"][:steps]],
    )
    highest = max(range(len(bottom)), key=bottom.__getitem__)
    axes.plot(times[highest], bottom[highest], "o", color=INK, markersize=4, clip_on=False, zorder=5)
    at_left = times[highest] < times[-1] / 5
    axes.annotate(
        f"peak {bottom[highest]:.2f} GiB",
        (times[highest], bottom[highest]),
        xytext=(-4 if at_left else 0, 7),
        textcoords="offset points",
        ha="left" if at_left else "center",
        fontsize=9,
        fontweight="bold",
        color=INK,
    )
    if cap is not None:
        axes.axhline(cap, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"cap {cap:.2f} GiB",
            (1, cap),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=INK,
        )


def label_owners(axes: Axes, run: dict, steps: int, floor: float) -> None:
    """Names each owner at the right edge, beside what it holds at its own largest, spread so that names never touch."""
    _, sizes = first_steps(run, steps)
    height = axes.get_ylim()[1]
    place, base = -1.0, 0.0
    for owner, color in zip(OWNERS, OWNER_COLORS, strict=True):
        largest = max(sizes[owner])
        place = max(place + floor * height, base + largest / 2)
        amount = f"{largest:.2f} GiB" if largest > 0.005 else "none"
        axes.annotate(
            f"{owner}\n{amount}",
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=color,
            fontweight="bold",
            linespacing=1.1,
            annotation_clip=False,
        )
        base += largest


def plot_memory(runs: list[dict], steps: int, cap: float | None, path: pathlib.Path) -> None:
    """One panel a run, all on one scale."""
    figure, panels = plt.subplots(1, len(runs), figsize=(5.6 * len(runs), 4.2), sharey=True, squeeze=False)
    for axes, run in zip(panels[0], runs, strict=True):
        draw_memory(axes, run, steps, cap)
    panels[0][0].set_ylim(0, panels[0][0].get_ylim()[1] * 1.08)
    panels[0][0].set_ylabel("device memory, GiB")
    for axes, run in zip(panels[0], runs, strict=True):
        label_owners(axes, run, steps, floor=0.105)
    figure.tight_layout(w_pad=2.0)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def plot_loss(runs: list[dict], path: pathlib.Path) -> None:
    """All runs in one panel. Runs with the same bits are drawn as one line that says so."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for run in runs:
        groups.setdefault(tuple(step["loss"] for step in run["steps"]), []).append(run["title"])
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for (losses, titles), color in zip(groups.items(), RUN_COLORS * len(groups), strict=False):
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color=color, linewidth=1.8, marker="o", markersize=4)
        name = titles[0] if len(titles) == 1 else " and\n".join(titles) + ":\nthe same bits"
        axes.annotate(
            name,
            (steps[-1], losses[-1]),
            xytext=(14, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=color,
            fontweight="bold",
            annotation_clip=False,
        )
        for index, above in ((0, True), (-1, False)):
            axes.annotate(
                f"{losses[index]:.2f}",
                (steps[index], losses[index]),
                xytext=(0, 7 if above else -8),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=9,
                color=INK,
            )
    style(axes, "loss (cross-entropy)")
    axes.set_xlabel(runs[0].get("steps_are", "step"))
    axes.set_ylim(0, 1.15 * max(max(losses) for losses in groups))
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=150, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for the plots (default: here)"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps that the memory plot shows (default: 3)")
    parser.add_argument("--cap", type=float, help="a line at this many bytes of device memory")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    runs = [run for path in chosen.runs if (run := read_run(path))["steps"]]
    if not runs:
        raise SystemExit("none of the runs has a step")
    plot_loss(runs, chosen.out / "loss.png")
    timed = [run for run in runs if run["timeline"]]
    if timed:
        plot_memory(timed, chosen.steps, chosen.cap / GIB if chosen.cap else None, chosen.out / "memory.png")


if __name__ == "__main__":
    main()
