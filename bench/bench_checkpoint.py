"""Saving and loading beside the disk itself: bytes a second of a checkpoint, and fio's sequential rates.

`./dev bench checkpoint DIR`. Pairs in turn: a save and fio's write of a new file, a load and fio's read, of as many bytes
in the same folder. Then a save beside training: how long the call takes, and how much longer the step after it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from typing import Any

import torch

from bench_nvme import Wide
from pairs import report

PIECE, DEPTH = 8 << 20, 8  # As a checkpoint's.


def fio_rate(path: pathlib.Path, nbytes: int, kind: str) -> float:
    """Bytes a second of one pass. As a save does, a write makes a new file, in space set aside, and ends with a sync."""
    if kind == "write":
        path.unlink(missing_ok=True)
    command = [
        "fio", "--name=peer", "--thread", "--ioengine=io_uring", f"--filename={path}", f"--size={nbytes}", f"--bs={PIECE}",
        f"--iodepth={DEPTH}", "--direct=1", f"--rw={kind}", "--fallocate=native", "--end_fsync=1", "--output-format=json",
    ]  # fmt: skip
    start = time.perf_counter()
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    seconds = job[kind]["runtime"] / 1000 or time.perf_counter() - start
    return float(job[kind]["io_bytes"]) / seconds


def engine_with(numel: int, home: dict[str, Any], beside: bool = False):
    import pannier  # noqa: PLC0415

    settings = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2, "offload_optimizer": home},
        "checkpoint": {"async": beside},
    }
    return pannier.initialize(model=Wide(numel), config=settings)[0]


def step(engine) -> float:
    start = time.perf_counter()
    engine.backward(engine())
    engine.step()
    return time.perf_counter() - start


def timed(call, *arguments) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def loads_the_same(engine, folder: str, home: dict[str, Any], numel: int) -> bool:
    engine.save_checkpoint(folder, tag="check")
    other = engine_with(numel, home)
    other.load_checkpoint(folder, tag="check")
    same = all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), other.module.parameters(), strict=True))
    other.destroy()
    shutil.rmtree(pathlib.Path(folder) / "check")
    return same


def of(ours: list[float], fio: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, fio, strict=True)]
    return {
        "bytes_per_second": statistics.median(ours),
        "fio_bytes_per_second": statistics.median(fio),
        "of_fio": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def measure(engine, folder: str, nbytes: int, pairs: int) -> dict[str, dict[str, Any]]:
    peer = pathlib.Path(folder) / "peer"
    rates: dict[str, list[float]] = {"save": [], "write": [], "load": [], "read": []}
    engine.save_checkpoint(folder, tag="one")
    for _ in range(pairs):
        rates["save"].append(nbytes / timed(engine.save_checkpoint, folder, "one"))
        rates["write"].append(fio_rate(peer, nbytes, "write"))
        rates["load"].append(nbytes / timed(engine.load_checkpoint, folder, "one"))
        rates["read"].append(fio_rate(peer, nbytes, "read"))
    peer.unlink()
    return {"save": of(rates["save"], rates["write"]), "load": of(rates["load"], rates["read"])}


def measure_beside(folder: str, home: dict[str, Any], numel: int, pairs: int) -> dict[str, float]:
    engine = engine_with(numel, home, beside=True)
    plain, call, next_step = [], [], []
    for _ in range(pairs):
        step(engine)
        plain.append(step(engine))
        call.append(timed(engine.save_checkpoint, folder, "beside"))
        next_step.append(step(engine))
        engine.finish_checkpoint()
    waited = engine.memory_stats()["checkpoint"]["waited_s"] / pairs
    engine.destroy()
    return {
        "step_s": round(statistics.median(plain), 4),
        "call_s": round(statistics.median(call), 4),
        "next_step_s": round(statistics.median(next_step), 4),
        "waited_s": round(waited, 4),
    }


def print_table(home: str, numel: int, nbytes: int, measured: dict[str, dict[str, Any]]) -> None:
    print(f"{numel / 1e6:.0f} M parameters, states at home on {home}, {nbytes / 1e9:.2f} GB")
    print(f"{'':<6}{'GB/s':>8}{'fio GB/s':>10}{'of fio':>8}{'spread':>16}")
    for what, row in measured.items():
        spread = f"{row['spread'][0]:.2f} to {row['spread'][1]:.2f}"
        print(f"{what:<6}{row['bytes_per_second'] / 1e9:>8.2f}{row['fio_bytes_per_second'] / 1e9:>10.2f}{row['of_fio']:>8.2f}{spread:>16}")


def main(rest: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench checkpoint")
    parser.add_argument("path", type=pathlib.Path, nargs="?", help="a folder on the disk; default: a temporary one")
    parser.add_argument("--mebi-parameters", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--home", choices=("cpu", "nvme"), default="cpu", help="of the optimizer's states")
    arguments = parser.parse_args(rest)
    if shutil.which("fio") is None:
        print("checkpoint: fio is missing, and without it there is nothing to compare with")
        return 1
    numel = arguments.mebi_parameters << 20
    with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
        home = {"device": arguments.home, **({"nvme_path": folder} if arguments.home == "nvme" else {})}
        engine = engine_with(numel, home)
        step(engine)
        same = loads_the_same(engine, folder, home, numel)
        report(bench="checkpoint", check="weights after a load", same_bits=same)
        if not same:
            print("the weights differ; no speed is reported")
            return 1
        nbytes = 12 * numel
        measured = measure(engine, folder, nbytes, arguments.pairs)
        engine.destroy()
        beside = measure_beside(folder, home, numel, arguments.pairs)
    print_table(arguments.home, numel, nbytes, measured)
    report(bench="checkpoint", home=arguments.home, parameters=numel, bytes=nbytes, **measured, beside=beside,
           threads=torch.get_num_threads())  # fmt: skip
    return 0
