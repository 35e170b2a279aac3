"""Ranks as processes over torch.distributed's Gloo: what arrives, and what each rank is told when another is missing.

Ranks are processes that run this same file under a watchdog; a rank prints one line of JSON. Cases that no rank dies of
run one after the other in the same processes, each with a group of its own, also after one whose group is dead.
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

from ranks import free_port

WATCHDOG = 180.0
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    # NCCL's own watchdog would end the process where the monitor has an error to give.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
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
    probe.start(kind, step, unit, [piece] * world, [nbytes] * world, False)
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
        nbytes = [2 * x.numel() for x in theirs]
        probe.start(GRADIENTS, 1, round, [x.view(torch.uint8) for x in mine], nbytes, round % 2 == 1)
        for other, came in enumerate(probe.wait()):
            if other != rank and not torch.equal(came.view(torch.int16), theirs[other].view(torch.int16)):
                wrong.append([round, other])
    values = probe.sum([rank + 1, -(1 << 40)])
    tensor = torch.full((1000, 3), float(rank), dtype=torch.bfloat16)
    probe.broadcast(tensor, world - 1)
    return {"wrong": wrong, "sum": values, "broadcast": bool((tensor == world - 1).all())}


CASES["bits_again"] = bits


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
        probe.start(GRADIENTS, step, 0, pieces, [numel] * world, False)
        came = probe.wait()
    return all(bool((came[other] == other + 1).all()) for other in range(world) if other != rank)


@case
def killed(probe: Any, rank: int, world: int) -> Any:
    equal_exchange(probe, world, 1, 0)
    if rank == 1:
        probe.start(GRADIENTS, 2, 5, [torch.zeros(8 << 20, dtype=torch.uint8)] * world, [8 << 20] * world, False)
        os.kill(os.getpid(), signal.SIGKILL)
    first = error_of(lambda: equal_exchange(probe, world, 2, 5, 8 << 20))
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


# On GPUs, where nobody on the host waits for a message.


def bits_on_gpu(probe: Any, rank: int, world: int) -> Any:
    device = torch.device("cuda", rank)
    wrong = []
    for round in range(10):
        mine = [bf16_piece(rank, other, round).to(device) for other in range(world)]
        theirs = [bf16_piece(other, rank, round) for other in range(world)]
        nbytes = [2 * x.numel() for x in theirs]
        probe.start(GRADIENTS, 1, round, [x.view(torch.uint8) for x in mine], nbytes, round % 2 == 1)
        for other, came in enumerate(probe.wait()):
            if other != rank and not torch.equal(came.cpu().view(torch.int16), theirs[other].view(torch.int16)):
                wrong.append([round, other])
        if probe.mismatch():
            wrong.append([round, "stamp"])
    tensor = torch.full((1000, 3), float(rank), dtype=torch.bfloat16, device=device)
    probe.broadcast(tensor, world - 1)
    return {"wrong": wrong, "sum": probe.sum([rank + 1]), "broadcast": bool((tensor == world - 1).all())}


def branches_on_gpu(probe: Any, rank: int, world: int) -> Any:
    piece = torch.zeros(4096, dtype=torch.uint8, device=torch.device("cuda", rank))

    def gather() -> None:
        probe.start(PARAMETERS, 1, 7 + rank, [piece] * world, [4096] * world, False)
        probe.wait()

    # The stamps tell, or the monitor, which compares where ranks are, has been faster.
    return error_of(gather)[0] == "RuntimeError" or probe.mismatch()


def missing_on_gpu(probe: Any, rank: int, world: int) -> Any:
    piece = torch.zeros(4096, dtype=torch.uint8, device=torch.device("cuda", rank))
    if rank != 1:
        # Where NCCL connects at its first exchange, already starting it waits for the other rank.
        error_of(lambda: probe.start(PARAMETERS, 1, 7, [piece] * world, [4096] * world, False))
        error_of(probe.wait)
    return wait_for_failure(probe)


CASES |= {"gpu_bits": bits_on_gpu, "gpu_branches": branches_on_gpu, "gpu_missing": missing_on_gpu}


def run_rank(rank: int, world: int, port: int, timeout_ms: int, heartbeat_ms: int, *names: str) -> None:
    import pannier  # noqa: F401

    keeps_store = rank == 0 and "keeper_killed" in names
    store = dist.TCPStore("127.0.0.1", port, is_master=keeps_store, wait_for_workers=False)
    on_gpu = names[0].startswith("gpu")
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    device = torch.device("cuda", rank) if on_gpu else None
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=WATCHDOG), device_id=device
    )
    hosts = dist.new_group(backend="gloo")
    results = {}
    for name in names:
        group = dist.new_group(backend=backend, device_id=device)
        probe = torch.classes.pannier.CommunicatorProbe(group.boxed(), timeout_ms, 20, heartbeat_ms)
        results[name] = CASES[name](probe, rank, world)
        if len(names) > 1:
            dist.barrier(group=hosts)
        probe.close()
    print(json.dumps(results), flush=True)
    if on_gpu:
        os._exit(0)  # At the process's end NCCL's threads may meet communicators that a test left without a rank.


def run_ranks(
    *names: str,
    world: int,
    timeout_ms: int = 120_000,
    heartbeat_ms: int = 60_000,
    dies: int | None = None,
    **environment: str,
) -> dict[str, list[Any]]:
    """What each rank returned, by case; None for a rank that dies. The others must end by themselves, with status 0."""
    store = None
    port = free_port()
    if "keeper_killed" not in names:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    numbers = [str(number) for number in (world, port, timeout_ms, heartbeat_ms)]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *numbers, *names],
            env=os.environ | ENVIRONMENT | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    results: dict[str, list[Any]] = {name: [None] * world for name in names}
    try:
        for rank, process in enumerate(ranks):
            if rank != dies:
                out, err = process.communicate(timeout=WATCHDOG)
                assert process.returncode == 0, f"rank {rank}: {process.returncode}\n{out}\n{err}"
                for name, result in json.loads(out.splitlines()[-1]).items():
                    results[name][rank] = result
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()
    del store
    return results


@pytest.fixture(scope="module")
def three_ranks() -> dict[str, list[Any]]:
    """What three ranks return that go through many groups."""
    names = ("bits", "large", "wire", "failing", "differing", "branches", "sizes", "forked", "late", "bits_again")
    return run_ranks(*names, world=3, timeout_ms=10_000)


def arrived(world: int) -> list[Any]:
    total = [world * (world + 1) // 2, -world * (1 << 40)]
    return [{"wrong": [], "sum": total, "broadcast": True}] * world


@pytest.mark.parametrize(("world", "debug"), [(1, "OFF"), (2, "DETAIL"), (4, "OFF")])
def test_every_bit_arrives_where_it_should(world: int, debug: str) -> None:
    """Also through the wrapper that torch puts around a group to debug it."""
    assert run_ranks("bits", world=world, TORCH_DISTRIBUTED_DEBUG=debug)["bits"] == arrived(world)


def test_groups_after_dead_ones_are_whole(three_ranks: dict[str, list[Any]]) -> None:
    assert three_ranks["bits"] == arrived(3) and three_ranks["bits_again"] == arrived(3)


def test_large_messages_arrive(three_ranks: dict[str, list[Any]]) -> None:
    assert three_ranks["large"] == [True] * 3


def test_wire_bytes_are_counted(three_ranks: dict[str, list[Any]]) -> None:
    payload = [0, 3 * 2 * 4096, 0, 0, 0]
    overhead = [0, 3 * 2 * (16 + 24), 0, 0, 0]
    assert three_ranks["wire"] == [[payload, overhead]] * 3


def test_a_failing_rank_ends_all(three_ranks: dict[str, list[Any]]) -> None:
    for kind, text in three_ranks["failing"]:
        assert kind == "RuntimeError" and "rank 1 failed: no space left on device" in text, text


def test_differing_texts_are_shown_on_every_rank(three_ranks: dict[str, list[Any]]) -> None:
    for kind, text in three_ranks["differing"]:
        assert kind == "ValueError"
        assert "rank 2 differs from rank 0 in the configuration: line 2: 'lr 0.1' on rank 0, 'lr 0.2' on rank 2" in text


def test_ranks_in_different_branches_are_told(three_ranks: dict[str, list[Any]]) -> None:
    for kind, text in three_ranks["branches"]:
        assert kind == "RuntimeError"
        for part in ("rank 0", "parameter gather of bucket 7, step 1", "parameter gather of bucket 8, step 1"):
            assert part in text, text


def test_different_sizes_are_an_error_and_no_crash(three_ranks: dict[str, list[Any]]) -> None:
    for kind, text in three_ranks["sizes"]:
        assert kind == "RuntimeError" and "4112" in text and "8208" in text, text


def test_a_forked_child_has_no_part_in_the_group(three_ranks: dict[str, list[Any]]) -> None:
    assert three_ranks["forked"] == [3] * 3


def test_a_late_rank_is_named_and_told(three_ranks: dict[str, list[Any]]) -> None:
    for kind, text in three_ranks["late"]:
        assert kind == "RuntimeError"
        assert "rank 1 has not reached gradient exchange of bucket 5, step 2" in text, text
        assert "last seen: gradient exchange of bucket 3, step 1" in text, text


def test_a_killed_rank_is_named() -> None:
    results = run_ranks("killed", world=4, dies=1)["killed"]
    for rank in (0, 2, 3):
        (first_kind, first), (kind, text) = results[rank]
        assert kind == "RuntimeError" and "rank 1" in text, text
        # A rank whose messages had all come before the kill learns of it in its next operation.
        assert first_kind == "none" or ("rank 1" in first and "gradient exchange of bucket 5, step 2" in first), first


@pytest.mark.parametrize(
    ("name", "dead", "said"),
    [
        ("keeper_killed", 0, "rank 0"),
        ("stopped", 1, "rank 1 died (no heartbeat for 3 s)"),
        ("leaving", 1, "rank 1"),
    ],
)
def test_a_rank_that_is_gone_is_named(name: str, dead: int, said: str) -> None:
    """Also where it kept the store, where it stands still with its connections open, and where it ended in order."""
    dies = None if name == "leaving" else dead
    for rank, result in enumerate(run_ranks(name, world=3, heartbeat_ms=3000, dies=dies)[name]):
        if rank != dead:
            kind, text = result
            assert kind == "RuntimeError" and said in text, text


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs")
def test_gpus_exchange_stamped_messages_and_name_who_is_missing() -> None:
    results = run_ranks("gpu_bits", "gpu_branches", "gpu_missing", world=2, timeout_ms=10_000)
    assert results["gpu_bits"] == [{"wrong": [], "sum": [3], "broadcast": True}] * 2
    assert results["gpu_branches"] == [True, True]
    for kind, text in results["gpu_missing"]:
        assert kind == "RuntimeError" and "rank 1 has not reached parameter gather of bucket 7, step 1" in text, text


if __name__ == "__main__":
    run_rank(*[int(number) for number in sys.argv[1:6]], *sys.argv[6:])
