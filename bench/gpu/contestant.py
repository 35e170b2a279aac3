"""Runs one contestant on one work, in a process of its own, and prints one JSON line.

    python bench/gpu/contestant.py --who pannier --work 1.5b-16k --json
    torchrun --standalone --nproc-per-node 2 bench/gpu/contestant.py --who pannier --work 1.5b-16k --json

What a contestant prints goes to stderr. A contestant that fails gives a line with "reason"; the exit status is then 1.
Lines with only "phase" say how far it is, for whoever ends it early. Of many ranks only the first prints: its own times
and memory, which are every rank's but for the waits at exchanges.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, TextIO

sys.path[0] = str(pathlib.Path(__file__).parents[1])  # Modules here must not be found in place of others' by name.

from gpu import host_memory  # noqa: E402  (imports nothing large: memory is read before torch comes)

if TYPE_CHECKING:
    import torch

    from gpu.trainer import Contestant, Setup, Trainer


def main() -> int:
    arguments = parse_arguments()
    used_before = host_memory.used_nbytes()
    host_memory.offer_to_the_kernel()
    # DeepSpeed reads the numbers of this list only: "9.0a" stops it.
    if arches := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = arches.replace("a", "")
    out = take_stdout()
    row: dict[str, Any] = {"who": arguments.who, "work": "tiny" if arguments.tiny else arguments.work}
    status = 0
    try:
        row |= prepare(arguments, out) if arguments.prepare else measure(arguments, used_before, out)
    except Exception as error:  # noqa: BLE001  (whatever goes wrong in somebody else's code is its row's reason)
        traceback.print_exc()
        row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        status = 1
    print(json.dumps(row, indent=None if arguments.json else 2), file=out, flush=True)
    sys.stderr.flush()
    os._exit(status)  # Tearing down process groups and pinned memory is no part of what is measured, and may hang.


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--who", default="torch")
    parser.add_argument("--work", default="1.5b-16k")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the work `tiny`, whatever --work says")
    parser.add_argument("--device-memory-gib", type=float, help="a budget, for the contestants that take one")
    parser.add_argument("--device-limit-gib", type=float, help="what torch's allocator may take, for every contestant")
    parser.add_argument("--disk", type=pathlib.Path, help="a folder, for the contestants that keep states on a disk")
    parser.add_argument("--trace", type=pathlib.Path, help="a file: Pannier writes a trace of a step")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="a folder: save and load there after the timed steps")
    parser.add_argument("--prepare", action="store_true", help="compile DeepSpeed's extensions instead")
    parser.add_argument("--json", action="store_true", help="one line")
    return parser.parse_args()


def take_stdout() -> TextIO:
    """The real stdout for the first rank's JSON alone; what anybody else prints, in C too, goes to stderr."""
    real = os.dup(1)
    os.dup2(2, 1)
    if os.environ.get("RANK", "0") != "0":
        os.close(real)
        real = os.open(os.devnull, os.O_WRONLY)
    return os.fdopen(real, "w", encoding="utf-8")


def say_phase(out: TextIO, phase: str) -> None:
    print(json.dumps({"phase": phase}), file=out, flush=True)


def prepare(arguments: argparse.Namespace, out: TextIO) -> dict[str, Any]:
    from gpu import peers  # noqa: PLC0415

    say_phase(out, "compiling DeepSpeed's extensions")
    start = time.perf_counter()
    peers.prepare_deepspeed(disk=arguments.disk is not None)
    return {"seconds": round(time.perf_counter() - start, 1)}


def measure(arguments: argparse.Namespace, used_before: int, out: TextIO) -> dict[str, Any]:
    say_phase(out, "importing torch")
    import torch  # noqa: PLC0415

    from gpu import checkpoints, meters, training_models  # noqa: PLC0415

    contestant, setup = choose(arguments)
    limit_device(setup.device, arguments.device_limit_gib)
    peaks = meters.DevicePeaks(setup.device)
    say_phase(out, "building the model")
    built_at = time.perf_counter()
    model = training_models.build(setup.work, torch.device("cpu") if contestant.model_on_host else setup.device)
    batch = training_models.batch_of(setup.work, setup.device)
    row = describe(contestant, setup) | {"parameters": training_models.numel(model)}
    meters.synchronize(setup.device)
    row["build_seconds"] = round(time.perf_counter() - built_at, 3)
    peaks.next_phase()

    say_phase(out, "starting up")
    start = time.perf_counter()
    trainer = contestant.start(model, setup)
    meters.synchronize(setup.device)
    row["start_up_seconds"] = round(time.perf_counter() - start, 3)
    del model

    row |= train(trainer, batch, arguments, peaks, out)
    row |= host_memory.of_process(used_before)
    if arguments.checkpoints is not None:
        say_phase(out, "saving and loading")
        row |= checkpoints.measure(trainer, setup.device, arguments.checkpoints)
    row["details"] = trainer.details()
    return row


def choose(arguments: argparse.Namespace) -> tuple[Contestant, Setup]:
    import torch  # noqa: PLC0415

    from gpu import ours, peers, works  # noqa: PLC0415
    from gpu.trainer import Setup  # noqa: PLC0415

    everyone = peers.contestants() | ours.contestants()
    if arguments.who not in everyone:
        raise ValueError(f"no contestant is called {arguments.who!r}; there are {', '.join(everyone)}")
    if arguments.steps < 1:
        raise ValueError(f"steps must be positive, not {arguments.steps}")
    work = works.parse("tiny" if arguments.tiny else arguments.work)
    budget = arguments.device_memory_gib
    nbytes = None if budget is None else int(budget * host_memory.GIB)
    return everyone[arguments.who], Setup(work, device_of_rank(arguments.device), nbytes, arguments.disk, arguments.trace)


def device_of_rank(kind: str) -> torch.device:
    import torch  # noqa: PLC0415

    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def limit_device(device: torch.device, limit_gib: float | None) -> None:
    import torch  # noqa: PLC0415

    if device.type == "cuda":
        torch.cuda.init()
        if limit_gib is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * host_memory.GIB / total))


def describe(contestant: Contestant, setup: Setup) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    from gpu.trainer import num_ranks  # noqa: PLC0415

    name = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "cpu"
    ranks = num_ranks()
    return {
        "work": setup.work.name,
        "note": contestant.note,
        "device": name,
        "ranks": ranks,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tokens": setup.work.tokens * ranks,
        "precision": setup.work.precision,
        "device_memory_nbytes": setup.device_memory_nbytes,
    }


def train(trainer: Trainer, batch: Any, arguments: argparse.Namespace, peaks: Any, out: TextIO) -> dict[str, Any]:
    from gpu import meters  # noqa: PLC0415

    device = peaks.device
    say_phase(out, "the first step")
    start = time.perf_counter()
    first = trainer.step(batch)
    row: dict[str, Any] = {"first_loss": round(first.item(), 5)}
    meters.synchronize(device)
    row["first_step_seconds"] = round(time.perf_counter() - start, 3)
    say_phase(out, "warming up")
    for _ in range(arguments.warm_up - 1):
        trainer.step(batch)
    trainer.finish()
    meters.synchronize(device)
    peaks.next_phase()

    say_phase(out, "timed steps")
    clock = meters.StepClock(device)
    for _ in range(arguments.steps):
        clock.mark()
        last = trainer.step(batch)
    clock.mark()
    trainer.finish()
    row |= clock.report()
    of_steps = peaks.next_phase()
    row |= {"steps": arguments.steps, "warm_up": max(1, arguments.warm_up), "last_loss": round(last.item(), 5)}
    return row | peaks.report(of_steps)


if __name__ == "__main__":
    sys.exit(main())
