"""Ranks as processes over torch.distributed's Gloo: what arrives, and what each rank is told when another is missing.

Each test starts ranks of this same file under a watchdog; a rank prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

WATCHDOG = 180.0
GRADIENTS, PARAMETERS, VOTES, OTHER = range(4)
CASES: dict[str, Callable[[Any, int, int], Any]] = {}


def case(body: Callable[[Any, int, int], Any]) -> Callable[[Any, int, int], Any]:
    """Makes a function a rank's program; what it returns is what the rank prints."""
    CASES[body.__name__] = body
    return body


def error_of(action: Callable[[], Any]) -> list[str]:
    """The kind and the text of the error that `action` ends with."""
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def wait_for_failure(probe: Any) -> list[str]:
    """Waits, under the watchdog, for this rank to learn that its group is dead."""
    while (error := error_of(probe.check))[0] == "none":
        pass
    return error


def equal_exchange(probe: Any, world: int, step: int, unit: int, nbytes: int = 64, kind: int = GRADIENTS) -> Any:
    piece = torch.zeros(nbytes, dtype=torch.uint8)
    probe.start(kind, step, unit, [piece] * world, [nbytes] * world)
    return probe.wait()


# Ranks' programs.


def bf16_piece(source: int, target: int, round: int) -> torch.Tensor:
    """Every bit pattern may occur, NaNs of all kinds too; uneven, empty for some pairs."""
    numel = (source * 7 + target * 3 + round) % 4 * 5003
    generator = torch.Generator().manual_seed(source * 1000 + target * 100 + round)
    return torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator, dtype=torch.int16).view(torch.bfloat16)


@case
def bits(probe: Any, rank: int, world: int) -> Any:
    probe.agree("the configuration", "same")
    wrong = []
    for round in range(10):
        mine = [bf16_piece(rank, other, round) for other in range(world)]
        theirs = [bf16_piece(other, rank, round) for other in range(world)]
        probe.start(GRADIENTS, 1, round, [x.view(torch.uint8) for x in mine], [2 * x.numel() for x in theirs])
        for other, came in enumerate(probe.wait()):
            if other != rank and not torch.equal(came.view(torch.int16), theirs[other].view(torch.int16)):
                wrong.append([round, other])
    values = probe.sum([rank + 1, -(1 << 40)])
    tensor = torch.full((1000, 3), float(rank), dtype=torch.bfloat16)
    probe.broadcast(tensor, world - 1)
    return {"wrong": wrong, "sum": values, "broadcast": bool((tensor == world - 1).all())}


@case
def wire(probe: Any, rank: int, world: int) -> Any:
    for step in range(3):
        equal_exchange(probe, world, step, 0, 4096, PARAMETERS)
    return probe.wire_bytes()


@case
def large(probe: Any, rank: int, world: int) -> Any:
    numel = 8 << 20
    pieces = [torch.full((numel,), rank + 1, dtype=torch.uint8)] * world
    for step in range(3):
        probe.start(GRADIENTS, step, 0, pieces, [numel] * world)
        came = probe.wait()
    return all(bool((came[other] == other + 1).all()) for other in range(world) if other != rank)


@case
def killed(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 0)
    if rank == 1:
        probe.start(GRADIENTS, 2, 5, [torch.zeros(1 << 20, dtype=torch.uint8)] * world, [1 << 20] * world)
        os.kill(os.getpid(), signal.SIGKILL)
    first = error_of(lambda: equal_exchange(probe, world, 2, 5, 1 << 20))
    return [first, error_of(lambda: probe.sum([1]))]


@case
def keeper_killed(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 0)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: equal_exchange(probe, world, 2, 5))


@case
def stopped(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return error_of(lambda: equal_exchange(probe, world, 2, 5))


@case
def late(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 3)
    if rank == 1:
        wait_for_failure(probe)
    return error_of(lambda: equal_exchange(probe, world, 2, 5))


@case
def failing(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 0)
    if rank == 1:
        probe.report_failure("no space left on device")
        return error_of(lambda: probe.sum([1]))
    return error_of(lambda: equal_exchange(probe, world, 2, 5))


@case
def differing(probe: Any, rank: int, world: int) -> Any:
    text = "stage 2\nlr 0.1\nworld 3" if rank != 2 else "stage 2\nlr 0.2\nworld 3"
    return error_of(lambda: probe.agree("the configuration", text))


@case
def branches(probe: Any, rank: int, world: int) -> Any:
    return error_of(lambda: equal_exchange(probe, world, 1, 7 if rank == 0 else 8, 4096, PARAMETERS))


@case
def sizes(probe: Any, rank: int, world: int) -> Any:
    return error_of(lambda: equal_exchange(probe, world, 1, 7, 4096 if rank == 0 else 8192, PARAMETERS))


@case
def leaving(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 0)
    if rank == 1:
        return None
    return error_of(lambda: equal_exchange(probe, world, 2, 5))


@case
def forked(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 0)
    child = os.fork()
    if child == 0:
        text = error_of(probe.check)[1]
        del probe
        os._exit(3 if "forked child" in text else 4)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    equal_exchange(probe, world, 2, 0)
    return status


def run_case(name: str, rank: int, world: int, port: int, timeout_ms: int, heartbeat_ms: int) -> None:
    import pannier  # noqa: F401

    keeps_store = name == "keeper_killed" and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=keeps_store, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=WATCHDOG))
    group = dist.new_group(backend="gloo")
    probe = torch.classes.pannier.CommunicatorProbe(group.boxed(), timeout_ms, 20, heartbeat_ms)
    result = CASES[name](probe, rank, world)
    print(json.dumps(result), flush=True)
    probe.close()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    name: str, world: int, *, timeout_ms: int = 120_000, heartbeat_ms: int = 60_000, dies: int | None = None
) -> list[Any]:
    """What each rank printed; None for one that dies. Every other rank must end by itself, with exit status 0."""
    if name == "keeper_killed":
        port = free_port()
        store = None
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    words = [str(word) for word in (world, port, timeout_ms, heartbeat_ms)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, name, str(rank), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results: list[Any] = [None] * world
    try:
        for rank, process in enumerate(ranks):
            if rank == dies:
                continue
            out, err = process.communicate(timeout=WATCHDOG)
            assert process.returncode == 0, f"rank {rank}: {process.returncode}\n{out}\n{err}"
            results[rank] = json.loads(out.splitlines()[-1])
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()
    del store
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_bit_arrives_where_it_should(world: int) -> None:
    total = [world * (world + 1) // 2, -world * (1 << 40)]
    assert run_ranks("bits", world) == [{"wrong": [], "sum": total, "broadcast": True}] * world


def test_large_messages_arrive() -> None:
    assert run_ranks("large", 3) == [True] * 3


def test_wire_bytes_are_counted() -> None:
    payload = [0, 3 * 2 * 4096, 0, 0]
    overhead = [0, 3 * 2 * (16 + 24), 0, 0]
    assert run_ranks("wire", 3) == [[payload, overhead]] * 3


def test_a_killed_rank_is_named() -> None:
    results = run_ranks("killed", 4, dies=1)
    for rank in (0, 2, 3):
        for kind, text in results[rank]:
            assert kind == "RuntimeError" and "rank 1" in text, text
        assert "gradient exchange of bucket 5, step 2" in results[rank][0][1]


def test_a_killed_rank_that_kept_the_store_is_named() -> None:
    results = run_ranks("keeper_killed", 3, dies=0)
    for rank in (1, 2):
        kind, text = results[rank]
        assert kind == "RuntimeError" and "rank 0" in text, text


def test_a_stopped_rank_is_dead() -> None:
    results = run_ranks("stopped", 3, heartbeat_ms=2000, dies=1)
    for rank in (0, 2):
        kind, text = results[rank]
        assert kind == "RuntimeError" and "rank 1 died (no heartbeat for 2 s)" in text, text


def test_a_late_rank_is_named_and_told() -> None:
    for kind, text in run_ranks("late", 3, timeout_ms=3000):
        assert kind == "RuntimeError"
        assert "rank 1 has not reached gradient exchange of bucket 5, step 2" in text, text
        assert "last seen: gradient exchange of bucket 3, step 1" in text, text


def test_a_failing_rank_ends_all() -> None:
    for kind, text in run_ranks("failing", 3):
        assert kind == "RuntimeError" and "rank 1 failed: no space left on device" in text, text


def test_differing_texts_are_shown_on_every_rank() -> None:
    for kind, text in run_ranks("differing", 3):
        assert kind == "ValueError"
        assert "rank 2 differs from rank 0 in the configuration: line 2: 'lr 0.1' on rank 0, 'lr 0.2' on rank 2" in text


def test_ranks_in_different_branches_are_told() -> None:
    for kind, text in run_ranks("branches", 2):
        assert kind == "RuntimeError"
        for part in ("rank 0", "rank 1", "parameter gather of bucket 7, step 1", "parameter gather of bucket 8, step 1"):
            assert part in text, text


def test_different_sizes_are_an_error_and_no_crash() -> None:
    for kind, text in run_ranks("sizes", 2):
        assert kind == "RuntimeError" and "4112" in text and "8208" in text, text


def test_a_rank_that_leaves_is_named() -> None:
    results = run_ranks("leaving", 3)
    for rank in (0, 2):
        kind, text = results[rank]
        assert kind == "RuntimeError" and "rank 1" in text, text


def test_a_forked_child_has_no_part_in_the_group() -> None:
    assert run_ranks("forked", 2) == [3, 3]


if __name__ == "__main__":
    case_name, *numbers = sys.argv[1:]
    run_case(case_name, *[int(number) for number in numbers])
