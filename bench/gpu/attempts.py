"""Runs contestants in processes of their own, watches what they take of the machine, and always returns a row."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from gpu import host_memory

_CONTESTANT = pathlib.Path(__file__).with_name("contestant.py")
_WATCH_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Limits:
    """When an attempt is ended early."""

    timeout_seconds: float = 180.0
    host_gib: float | None = None  # What the machine may have in use, all processes together.
    deadline: float | None = None  # On time.monotonic().

    def seconds_left(self) -> float:
        """How long an attempt that starts now may take."""
        if self.deadline is None:
            return self.timeout_seconds
        return min(self.timeout_seconds, self.deadline - time.monotonic())


@dataclasses.dataclass
class _Watch:
    """What was seen of the machine while the contestant ran."""

    used_before: int
    most_used: int = 0
    stopped: str = ""


def attempt(who: str, work: str, options: list[str], limits: Limits, ranks: int = 1) -> dict[str, Any]:
    """One contestant on one work, on so many devices. The row has `reason` where it did not come to its end."""
    row: dict[str, Any] = {"who": who, "work": work}
    seconds = limits.seconds_left()
    if seconds <= 0:
        return row | {"reason": "not run: the time for the whole comparison was over"}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *several, str(_CONTESTANT), "--who", who, "--work", work, "--json", *options]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, env=_environment())
        watch = _wait(process, seconds, limits.host_gib)
        row |= _read(process, watch, out, err)
    row["host_used_peak_gib"] = round((watch.most_used - watch.used_before) / host_memory.GIB, 3)
    row["attempt_seconds"] = round(time.monotonic() - start, 1)
    return row


def _environment() -> dict[str, str]:
    # As many compilers as cores where a peer compiles its extensions, and no progress bars in anybody's output.
    return {"MAX_JOBS": str(os.cpu_count() or 1), "TOKENIZERS_PARALLELISM": "false", **os.environ}


def _wait(process: subprocess.Popen[bytes], seconds: float, host_gib: float | None) -> _Watch:
    watch = _Watch(used_before=host_memory.used_nbytes())
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        used = host_memory.used_nbytes()
        watch.most_used = max(watch.most_used, used)
        if time.monotonic() > deadline:
            watch.stopped = f"timed out after {seconds:.0f} s"
        elif host_gib is not None and used > host_gib * host_memory.GIB:
            watch.stopped = f"host memory: {used / host_memory.GIB:.1f} GiB in use on the machine, over {host_gib:g}"
        if watch.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # The contestant's own group: its children too.
            process.wait()
            break
        time.sleep(_WATCH_SECONDS)
    watch.most_used = max(watch.most_used, watch.used_before)
    return watch


def _read(process: subprocess.Popen[bytes], watch: _Watch, out: IO[str], err: IO[str]) -> dict[str, Any]:
    phase, row = "starting Python", None
    out.seek(0)
    for line in out:
        with contextlib.suppress(json.JSONDecodeError):
            values = json.loads(line)
            if set(values) == {"phase"}:
                phase = values["phase"]
            else:
                row = values
    if row is not None and "reason" not in row:
        return row
    log = _last_lines(err, 40)
    if row is not None:
        return row | {"phase": phase, "log": log}
    if watch.stopped:
        reason = watch.stopped
    elif process.returncode < 0:
        reason = f"ended by {signal.Signals(-process.returncode).name}"
    else:
        reason = f"ended with status {process.returncode}"
    said = f"; {log[-1]}" if log else ""
    return {"reason": f"{reason}, in: {phase}{said}", "phase": phase, "log": log}


def _last_lines(file: IO[str], count: int) -> list[str]:
    file.seek(0)
    return [line.rstrip()[:300] for line in file.readlines() if line.strip()][-count:]
