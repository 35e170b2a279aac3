"""Ranks as processes: a test file runs itself once a rank, under a watchdog, and each rank prints one line of JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed

import warm

WATCHDOG = 300.0
Program = Callable[[int, int], Any]


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def environment(rank: int, world: int, port: int, address: str = "127.0.0.1", local_size: int = 0) -> dict[str, str]:
    """What torchrun would set, and the path of what the tests share; `local_size` ranks are on a machine, or all."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (local_size or world)),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class Ended:
    """How a rank ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def result(self) -> Any:
        """What its program returned."""
        assert self.code == 0, f"exit {self.code}\n{self.out}\n{self.err}"
        return json.loads(self.out.splitlines()[-1])


def _start(rank: int, before: Sequence[str], command: list[str], env: dict[str, str]) -> warm.Process | subprocess.Popen[str]:
    if not before:
        return warm.Process(command[0], command[1:], env, rank)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*before, sys.executable, *command], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def run(
    file: str,
    program: str,
    world: int,
    *arguments: str,
    killed: Collection[int] = (),
    machines: Sequence[Sequence[str]] = ((),),
    address: str = "127.0.0.1",
) -> list[Ended]:
    """Runs a program of `file` on each rank. Those `killed` end when all others have. No rank outlives the watchdog.

    `machines`: what goes before a command to run it on each machine, which have equal numbers of ranks; the first one has
    the `address`.
    """
    port = free_port()
    local_size = world // len(machines)
    processes = [
        _start(rank, machines[rank // local_size], [file, program, *arguments], environment(rank, world, port, address, local_size))
        for rank in range(world)
    ]
    ended: dict[int, Ended] = {}
    try:
        for rank in sorted(range(world), key=lambda rank: rank in killed):
            if rank in killed:
                processes[rank].kill()
            out, err = processes[rank].communicate(timeout=WATCHDOG)
            ended[rank] = Ended(processes[rank].returncode, out, err)
    finally:
        for process in processes:
            process.kill()
    return [ended[rank] for rank in range(world)]


def run_and_kill(file: str, program: str, *arguments: str, after: float) -> None:
    """Runs a program of `file` as the only rank, and kills it `after` seconds from its first line."""
    process = subprocess.Popen(
        [sys.executable, file, program, *arguments], env=environment(0, 1, free_port()), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after)
    process.kill()
    process.wait()


def error_of(action: Callable[[], Any]) -> str:
    """The kind and the text of the error that `action` ends with; "" where it ends well."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(programs: dict[str, Program]) -> None:
    """The body of a test file that runs as a rank."""
    program, *arguments = sys.argv[1:]
    result = programs[program](int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *arguments)
    print(json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # Left to the process's end, torch's own threads may abort it.
