"""Runs programs of a test file under the frameworks that people drive DeepSpeed through, on Pannier.

`./dev test` installs the frameworks into folders of their own and names them in the environment. A program is a function
of the test file; it starts as a user's script would, and what it returns comes back as JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import ranks

STARTER = ("-m", "pannier.deepspeed")


def folder(which: str = "pinned") -> str:
    """Where the frameworks are; skips the test where `./dev test` could not install them."""
    found = os.environ.get(f"PANNIER_FRAMEWORKS_{which.upper()}")
    if not found:
        pytest.skip("the frameworks are not installed; ./dev test does it")
    return found


def environment(which: str = "pinned", **more: str) -> dict[str, str]:
    """The environment of a program: quiet, offline, one thread."""
    here = os.path.dirname(__file__)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder(which), here, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def start(
    arguments: Sequence[str], env: dict[str, str], cwd: str | pathlib.Path | None = None
) -> subprocess.Popen[str]:
    """Starts Python with `arguments`."""
    return subprocess.Popen(
        [sys.executable, *arguments], env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(
    file: str,
    program: str,
    *arguments: str,
    world: int = 1,
    which: str = "pinned",
    starter: Sequence[str] = STARTER,
    **more: str,
) -> list[Any]:
    """What the program returned on each rank."""
    env = environment(which, **more)
    port = ranks.free_port()
    processes = [
        start(
            [*starter, file, program, *arguments],
            env if world == 1 else {**env, **_place(rank, world, port)},
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=ranks.WATCHDOG) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        ranks.Ended(process.returncode, out, err).result
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]


def _place(rank: int, world: int, port: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    values = (rank, rank, world, world, "127.0.0.1", port, "lo")
    return {name: str(value) for name, value in zip(names, values, strict=True)}


def main(programs: dict[str, Any]) -> None:
    """The body of a test file that runs as a program."""
    name, *arguments = sys.argv[1:]
    print("\n" + json.dumps(programs[name](*arguments)), flush=True)
