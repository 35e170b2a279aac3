"""The update of states on a disk beside the disk itself: bytes a second that a step moves, and fio's mixed rate.

`./dev bench nvme DIR`. Pairs of a step and a run of fio, in turn, on files of the same size in the same folder, both written
before; fio gets the engine's piece size, depth, huge pages and registered buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

import torch

from pairs import report

PIECE, DEPTH = 1 << 20, 32


class Wide(torch.nn.Module):
    """Parameters whose gradient costs next to nothing."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.linspace(-1, 1, numel // 16) for _ in range(16))

    def forward(self) -> torch.Tensor:
        return torch.stack([part.float().sum() for part in self.parts]).sum()


def written_file(folder: pathlib.Path, nbytes: int) -> pathlib.Path:
    """A file of bytes that a disk can't compress away."""
    path = folder / "fio"
    block = os.urandom(1 << 24)
    with path.open("wb") as file:
        for at in range(0, nbytes, len(block)):
            file.write(block[: nbytes - at])
        os.fsync(file.fileno())
    return path


def fio_rate(path: pathlib.Path, nbytes: int, seconds: float) -> float:
    """Bytes a second, read and written together."""
    command = [
        "fio", "--name=peer", "--thread", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", f"--filename={path}",
        f"--size={nbytes}", f"--bs={PIECE}", f"--iodepth={DEPTH}", "--direct=1", "--rw=rw", "--time_based", f"--runtime={seconds}",
        "--overwrite=1", "--output-format=json",
    ]  # fmt: skip
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def engine_with(home: dict, numel: int):
    import pannier  # noqa: PLC0415

    settings = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2, "offload_optimizer": home},
    }
    return pannier.initialize(model=Wide(numel), config=settings)[0]


def timed_step(engine) -> tuple[float, int]:
    """Seconds of an update until all is on the disk again, and the bytes that it moved."""
    engine.backward(engine())
    before = engine.memory_stats()["nvme"]
    start = time.perf_counter()
    engine.step()
    engine.synchronize()
    seconds = time.perf_counter() - start
    after = engine.memory_stats()["nvme"]
    return seconds, after["read"] + after["written"] - before["read"] - before["written"]


def say_update_cost(folder: pathlib.Path, mebibytes: int) -> None:
    """What the program's own bench says of the update beside the same reads and writes without it."""
    command = ["pannier", "bench", "nvme", str(folder), f"--mebibytes={mebibytes}", "--seconds=0.1"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report(bench="nvme", update=next(line for line in output.splitlines() if line.startswith("update")))


def main(rest: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev bench nvme")
    parser.add_argument("path", type=pathlib.Path, nargs="?", help="a folder on the disk; default: a temporary one")
    parser.add_argument("--mebi-parameters", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--buffer-mebibytes", type=int, default=20, help="of each of 5 staging buffers")
    arguments = parser.parse_args(rest)
    numel = arguments.mebi_parameters << 20
    with tempfile.TemporaryDirectory(dir=arguments.path) as name:
        folder = pathlib.Path(name)
        host = engine_with({"device": "cpu"}, numel // 16)
        small = engine_with({"device": "nvme", "nvme_path": name, "buffer_size": 1 << 20}, numel // 16)
        for engine in (host, small, host, small):
            timed_step(engine)
        same = all(torch.equal(a, b) for a, b in zip(host.module.parameters(), small.module.parameters(), strict=True))
        report(bench="nvme", check="weights after two steps, against states in host memory", same_bits=same)
        for engine in (host, small):
            engine.destroy()
        if not same:
            print("the weights differ; no speed is reported")
            return 1
        home = {"device": "nvme", "nvme_path": name, "buffer_count": 5, "buffer_size": arguments.buffer_mebibytes << 20}
        engine = engine_with(home, numel)
        nbytes = engine.memory_stats()["nvme"]["current"]
        peer = written_file(folder, nbytes) if shutil.which("fio") else None
        timed_step(engine)
        ours, fio, moved = [], [], []
        for _ in range(arguments.pairs):
            seconds, step_bytes = timed_step(engine)
            ours.append(step_bytes / seconds)
            moved.append(step_bytes / numel)
            fio.append(fio_rate(peer, nbytes, max(1.0, seconds)) if peer else float("nan"))
        engine.destroy()
        say_update_cost(folder, nbytes >> 20)
    ratios = [a / b for a, b in zip(ours, fio, strict=True)]
    report(bench="nvme", parameters=numel, file_bytes=nbytes, bytes_per_parameter=round(statistics.median(moved), 3),
           bytes_per_second=statistics.median(ours), fio_bytes_per_second=statistics.median(fio),
           of_fio=round(statistics.median(ratios), 3), spread=[round(min(ratios), 3), round(max(ratios), 3)],
           threads=torch.get_num_threads())  # fmt: skip
    return 0
