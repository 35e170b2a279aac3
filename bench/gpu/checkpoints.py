"""Saving and loading a contestant's whole state: seconds, bytes a second and host memory, on files out of the cache."""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu import host_memory, meters
from gpu.trainer import Trainer

REPEATS = 3


def measure(trainer: Trainer, device: torch.device, folder: pathlib.Path) -> dict[str, Any]:
    """The medians of a few saves and loads in `folder`. Raises ValueError where the contestant is no engine.

    A save counts until its bytes are on the disk, whether or not the engine waits for that; a load begins with none of the
    files in the kernel's cache. `load_host_gib` is what loading added to the process at its most.
    """
    if trainer.engine is None:
        raise ValueError("only engines save checkpoints")
    trainer.finish()
    saves, loads, added = [], [], []
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        for _ in range(REPEATS):
            shutil.rmtree(pathlib.Path(inside) / "tag", ignore_errors=True)
            saves.append(_timed(device, lambda: _save(trainer.engine, inside)))
            nbytes = _forget(pathlib.Path(inside))
            before = host_memory.peak_of_process(reset=True)
            loads.append(_timed(device, lambda: trainer.engine.load_checkpoint(inside, tag="tag")))
            added.append(host_memory.peak_of_process() - before)
    save, load = statistics.median(saves), statistics.median(loads)
    return {
        "checkpoint_nbytes": nbytes,
        "save_seconds": round(save, 3),
        "load_seconds": round(load, 3),
        "save_gb_per_second": round(nbytes / save / 1e9, 3),
        "load_gb_per_second": round(nbytes / load / 1e9, 3),
        "load_host_gib": round(max(added) / host_memory.GIB, 3),
    }


def _timed(device: torch.device, call: Callable[[], Any]) -> float:
    meters.synchronize(device)
    start = time.perf_counter()
    call()
    meters.synchronize(device)
    return time.perf_counter() - start


def _save(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder, tag="tag")
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _forget(folder: pathlib.Path) -> int:
    """Drops the files under `folder` from the kernel's cache; their bytes."""
    nbytes = 0
    for path in folder.rglob("*"):
        if path.is_file():
            nbytes += path.stat().st_size
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return nbytes
