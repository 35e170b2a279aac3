"""The comparison on a GPU in one command: Pannier and every peer in one run, as a markdown table and a JSON file.

    python bench/gpu_table.py [--works 1.5b-8k,1.5b-16k,...] [--who torch,pannier,...] [--out gpu_table.json]
    python bench/gpu_table.py --ranks 2 [--works 1.5b-16k]                   every stage on several GPUs of one machine
    python bench/gpu_table.py --largest --budget 24 [--layers 8,12,...]   the largest model under 24 GiB
    python bench/gpu_table.py --disk FOLDER [--works 1.5b-16k]              states on a disk
    python bench/gpu_table.py --checkpoints FOLDER [--works 1.5b-16k]       saving and loading
    python bench/gpu_table.py --seed-script                               the model of examples/seed_script.py, fp16
    python bench/gpu_table.py --show FILE...                              the table of earlier runs' files

Each contestant runs each work in a fresh process. One that fails or takes too long gives a row with the reason.
Needs transformers, and for their rows deepspeed and torchao; Pannier must be importable as for any other script.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from gpu import largest, tables, works
from gpu.attempts import Limits, attempt

WORKS = "1.5b-8k,1.5b-16k,1.5b-32k,3b-16k,zero3-1.5b-16k"
# Peers come first: a budget for Pannier may be a peer's peak, and slack is counted from Pannier's own.
OURS = ["pannier-none", "pannier", "pannier-overlap"]
WHO = ["torch", "ds-zero2-none", "ds-zero2-offload", "torchao", "fsdp2", *OURS, "pannier-slack"]
WHO_ZERO3 = ["torch", "ds-zero3-offload", "fsdp2", "pannier-zero3", "pannier-zero3-overlap"]
WHO_RANKS = [
    *["torch", "fsdp2-none", "ds-zero1-none", "ds-zero2-none", "ds-zero3-none"],
    *["pannier-zero1-none", "pannier-none", "pannier-zero3-none"],
    *["fsdp2", "ds-zero1-offload", "ds-zero2-offload", "ds-zero3-states", "ds-zero3-offload"],
    *["pannier-zero1-offload", "pannier", "pannier-zero3-states", "pannier-zero3"],
]
WHO_LARGEST = ["pannier-zero3", "pannier", "ds-zero3-offload", "ds-zero2-offload"]
WHO_DISK = ["ds-zero3-nvme", "pannier-zero3-nvme", "pannier-nvme"]
WHO_CHECKPOINTS = ["ds-zero2-offload", "pannier"]
WHO_SEED = ["torch", "ds-zero2-none", "ds-zero2-offload", *OURS]
LAYERS = "8,12,16,20,24,28,30,32,34,36,38,40"
SLACK_GIB = 8.0
TAKES_BUDGET = ("pannier", "pannier-overlap", "pannier-zero3", "pannier-zero3-overlap")


class MissingError(Exception):
    """A contestant needs another row's figure, which is not there."""


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    if arguments.show:
        rows = [row for path in arguments.show for row in tables.read(path)]
        print(tables.markdown(rows))
        return 0
    deadline = None if arguments.deadline is None else time.monotonic() + arguments.deadline
    limits = Limits(arguments.timeout, arguments.host_limit, deadline)
    if arguments.largest:
        budget = 24.0 if arguments.budget is None else float(arguments.budget)
        layers = [int(count) for count in arguments.layers.split(",")]
        prepare(arguments.who or WHO_LARGEST, limits)
        largest.run(arguments.who or WHO_LARGEST, layers, budget, limits, arguments.out)
        return 0
    if arguments.seed_script:
        compare(["seed"], arguments, limits, mode="seed-script")
    else:
        compare(["tiny"] if arguments.tiny else arguments.works, arguments, limits, mode="table")
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", type=names, default=names(WORKS), help=f"default: {WORKS}")
    parser.add_argument("--who", type=names, help="contestants; default: all that fit the work")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one contestant on one work")
    parser.add_argument(
        "--deadline", type=float, help="seconds for everything; what does not fit is a row that says so"
    )
    parser.add_argument("--host-limit", type=float, default=125.0, help="GiB in use on the machine that end an attempt")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_table.json"))
    parser.add_argument("--budget", help="GiB of device memory for Pannier, or `peer`: DeepSpeed's peak in this run")
    parser.add_argument("--disk", type=pathlib.Path, help="a folder: compare training with states on its disk")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="a folder: each engine saves and loads there too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for tests in place of every work")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one for each GPU")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--layers", default=LAYERS, help=f"with --largest; default: {LAYERS}")
    parser.add_argument("--seed-script", action="store_true")
    parser.add_argument("--show", type=pathlib.Path, nargs="+", metavar="FILE")
    return parser.parse_args(argv)


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def prepare(whos: list[str], limits: Limits, folders: Sequence[str] = ()) -> str:
    """Has DeepSpeed compile what it needs, if it takes part; returns what went wrong."""
    if not any(who.startswith("ds-") for who in whos):
        return ""
    row = attempt("prepare", "deepspeed", ["--prepare", *folders], Limits(600.0, limits.host_gib, limits.deadline))
    said = row.get("reason") or f"{row['seconds']} s"
    print(f"compiling DeepSpeed's extensions: {said}", file=sys.stderr, flush=True)
    return row.get("reason", "")


def compare(work_names: list[str], arguments: argparse.Namespace, limits: Limits, mode: str) -> None:
    chosen = {name: arguments.who or default_who(name, mode, arguments) for name in work_names}
    preparation = prepare([who for whos in chosen.values() for who in whos], limits, folders_of(arguments))
    rows: list[tables.Row] = []
    for work, whos in chosen.items():
        for who in whos:
            try:
                budget = budget_gib(who, work, arguments.budget, rows)
            except MissingError as missing:
                row: dict[str, Any] = {"who": who, "work": work, "reason": f"not run: {missing}"}
            else:
                row = attempt(who, work, options_of(arguments, budget), limits, arguments.ranks)
            rows.append(row)
            print(progress(row), file=sys.stderr, flush=True)
            tables.write(arguments.out, rows, mode=mode, preparation=preparation)
    print(tables.markdown(rows), flush=True)


def default_who(work: str, mode: str, arguments: argparse.Namespace) -> list[str]:
    if mode == "seed-script":
        return WHO_SEED
    if arguments.disk is not None:
        return WHO_DISK
    if arguments.checkpoints is not None:
        return WHO_CHECKPOINTS
    if arguments.ranks > 1:
        return WHO_RANKS
    return WHO_ZERO3 if works.parse(work).offloads_parameters else WHO


def options_of(arguments: argparse.Namespace, budget: float | None) -> list[str]:
    options = ["--steps", str(arguments.steps), "--warm-up", str(arguments.warm_up), "--device", arguments.device]
    options += folders_of(arguments)
    return options if budget is None else [*options, "--device-memory-gib", f"{budget:.3f}"]


def folders_of(arguments: argparse.Namespace) -> list[str]:
    folders = {"--disk": arguments.disk, "--checkpoints": arguments.checkpoints}
    return [text for option, folder in folders.items() if folder is not None for text in (option, str(folder))]


def budget_gib(who: str, work: str, asked: str | None, rows: list[tables.Row]) -> float | None:
    """The device memory that `who` is given; None: it decides itself. Raises where another row's peak is missing."""
    if who == "pannier-slack":
        return peak_of("pannier", work, rows) + SLACK_GIB
    if asked is None or who not in TAKES_BUDGET:
        return None
    if asked != "peer":
        return float(asked)
    return peak_of("ds-zero3-offload" if "zero3" in who else "ds-zero2-offload", work, rows)


def peak_of(who: str, work: str, rows: list[tables.Row]) -> float:
    for row in rows:
        if row["who"] == who and row["work"] == work and row.get("device_peak_gib") is not None:
            return row["device_peak_gib"]
    raise MissingError(f"it needs the peak of {who} in the same run")


def progress(row: tables.Row) -> str:
    said = row.get("reason") or f"{row['seconds']:.3f} s a step"
    return f"{row['work']} {row['who']}: {said} ({row.get('attempt_seconds', 0)} s in all)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
