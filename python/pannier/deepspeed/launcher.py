"""The common flags of DeepSpeed's launcher, carried out by torchrun.

`python -m pannier.deepspeed --num_gpus 4 train.py ARGUMENTS` starts four ranks here. With a host file the same command runs
on each machine, with `--node_rank` where the machine's own name is not in the file: nothing is started over a network.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import sys
from collections.abc import Sequence

import torch


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"pannier.deepspeed: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = _Parser(prog="python -m pannier.deepspeed", description="Runs a DeepSpeed program on Pannier.")
    found.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each machine")
    found.add_argument("--num_nodes", type=int, default=-1, help="machines")
    found.add_argument("-H", "--hostfile", type=pathlib.Path, help="lines such as `name slots=4`")
    found.add_argument("--node_rank", type=int, default=-1, help="which machine this is, from 0")
    found.add_argument("--master_addr", default="", help="the first machine")
    found.add_argument("--master_port", type=int, default=29500, help="where ranks meet there")
    found.add_argument("--module", action="store_true", help="the program is a module's name")
    found.add_argument("--no_local_rank", action="store_true", help="accepted: --local_rank is never passed")
    found.add_argument("program", help="a script, or a module's name")
    found.add_argument("arguments", nargs=argparse.REMAINDER)
    return found


def command(words: Sequence[str]) -> list[str]:
    """The torchrun command that `words` ask for. Raises SystemExit with one line for what can't be."""
    reader = parser()
    flags = reader.parse_args(list(words))
    hosts = {} if flags.hostfile is None else read_hosts(flags.hostfile, reader)
    names = list(hosts)[: flags.num_nodes if flags.num_nodes > 0 else None]
    num_nodes = len(names) or max(flags.num_nodes, 1)
    if flags.num_nodes > num_nodes:
        reader.error(f"--num_nodes is {flags.num_nodes}, but {flags.hostfile} has {num_nodes} machines")
    node_rank = flags.node_rank
    if node_rank < 0 and num_nodes > 1:
        own = {socket.gethostname(), socket.getfqdn()}
        node_rank = next((rank for rank, name in enumerate(names) if name in own), -1)
        if node_rank < 0:
            reader.error("which machine is this? Give --node_rank; this machine's name is not in a host file")
    ranks_here = flags.num_gpus
    if ranks_here < 1:
        ranks_here = hosts[names[max(node_rank, 0)]] if names else max(torch.cuda.device_count(), 1)
    address = flags.master_addr or (names[0] if names else "")
    if num_nodes > 1 and not address:
        reader.error("several machines need --master_addr or --hostfile")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks_here}", f"--nnodes={num_nodes}"]
    if num_nodes > 1 or flags.master_addr:
        torchrun += [f"--master-addr={address or '127.0.0.1'}", f"--node-rank={max(node_rank, 0)}"]
    torchrun += [f"--master-port={flags.master_port}"]
    program = [*(["-m"] if flags.module else []), flags.program]
    return [*torchrun, "-m", "pannier.deepspeed", *program, *flags.arguments]


def read_hosts(path: pathlib.Path, reader: argparse.ArgumentParser) -> dict[str, int]:
    """Machines and their ranks."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reader.error(f"can't read host file {path}: {error.strerror}")
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 and words[1].startswith("slots=") else ""
        if not slots.isdigit() or int(slots) < 1 or words[0] in hosts:
            reader.error(f"{path}, line {number}: expected a new `name slots=N`, not {line.strip()!r}")
        hosts[words[0]] = int(slots)
    if not hosts:
        reader.error(f"{path} names no machine")
    return hosts


def main(words: Sequence[str]) -> None:
    """Becomes torchrun."""
    whole = command(words)
    os.execv(whole[0], whole)
