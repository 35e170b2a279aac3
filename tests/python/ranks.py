"""Ranks as processes: a test file runs itself once a rank, under a watchdog, and each rank prints one line of JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed

WATCHDOG = 300.0
Program = Callable[[int, int], Any]


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set, and the path of what the tests share."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
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


def run(file: str, program: str, world: int, *arguments: str, killed: Collection[int] = ()) -> list[Ended]:
    """Runs a program of `file` on each rank. Those `killed` end when all others have. No rank outlives the watchdog."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, file, program, *arguments],
            env=environment(rank, world, port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
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


def main(programs: dict[str, Program]) -> None:
    """The body of a test file that runs as a rank."""
    program, *arguments = sys.argv[1:]
    result = programs[program](int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *arguments)
    print(json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # Left to the process's end, torch's own threads may abort it.
