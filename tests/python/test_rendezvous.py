"""How ranks find each other: what is missing, unreachable or of another run is said, in time, on every rank."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import pytest
import torch

import pannier
import ranks
import warm
from pannier.rendezvous import interface_to, run_id


def meet(seconds: str) -> None:
    try:
        pannier.init_distributed(timeout=timedelta(seconds=float(seconds)))
    except (pannier.ConfigError, pannier.CollectiveError) as error:
        print(type(error).__name__, error)
        return
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print("met", int(total))
    torch.distributed.destroy_process_group()


def start(rank: int, world: int, port: int, seconds: float = 200.0, **variables: str) -> warm.Process:
    """One rank that meets the others at `port`, and says how that went."""
    return warm.Process(__file__, [str(seconds)], ranks.environment(rank, world, port) | variables, rank)


def said(*processes: warm.Process) -> list[str]:
    try:
        ends = [process.communicate(timeout=ranks.WATCHDOG) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), ends
    return [out.strip() for out, _ in ends]


def test_ranks_meet_on_the_route_to_the_address() -> None:
    port = ranks.free_port()
    assert said(*(start(rank, 2, port) for rank in range(2))) == ["met 2", "met 2"]


def test_what_is_missing_or_not_there_is_named_in_time() -> None:
    port, closed = ranks.free_port(), ranks.free_port()
    alone, unreached = said(start(0, 3, port, 3.0), start(1, 2, closed, 3.0))
    assert alone == f"CollectiveError ranks 1, 2 of 3 did not come to 127.0.0.1:{port} within 3 s"
    assert unreached.startswith(f"CollectiveError rank 1 did not reach rank 0 at 127.0.0.1:{closed} within 3 s: "), unreached


def test_another_run_on_the_same_address_is_refused_and_the_first_goes_on() -> None:
    port = ranks.free_port()
    mine = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    first = start(0, 2, port, **mine)
    (stranger,) = said(start(1, 2, port, **(mine | {"SLURM_JOB_ID": "8"})))
    assert stranger.startswith("ConfigError rank 1 of the run (SLURM_JOB_ID=8 SLURM_STEP_ID=0, 2 ranks) reached the run ("), stranger
    (server,) = said(start(0, 2, port, **mine))
    assert server.startswith(f"ConfigError rank 0 cannot be reached at 127.0.0.1:{port}"), server
    assert said(first, start(1, 2, port, **mine)) == ["met 2", "met 2"]


def test_a_second_process_of_one_rank_is_refused() -> None:
    port = ranks.free_port()
    zero, ones = start(0, 3, port), [start(1, 3, port), start(1, 3, port)]
    while all(process.poll() is None for process in ones):
        time.sleep(0.05)
    refused, kept = sorted(ones, key=lambda process: process.poll() is None)
    (why,) = said(refused)
    assert why.startswith("ConfigError another process is rank 1 of the run (3 ranks) at "), why
    assert said(zero, kept, start(2, 3, port)) == ["met 3"] * 3


def test_a_run_is_named_by_what_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCHELASTIC_RUN_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert run_id(4) == "4 ranks"
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert run_id(4) == "4 ranks"  # An interactive allocation, in which nothing was started.
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert run_id(4) == "SLURM_JOB_ID=3 SLURM_STEP_ID=1, 4 ranks"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert run_id(4) == "TORCHELASTIC_RUN_ID=job, 4 ranks"


def test_the_interface_is_that_of_the_route() -> None:
    assert interface_to("127.0.0.1") == "lo" == interface_to("localhost")
    assert interface_to("no.such.host.invalid") is None
    assert interface_to("127.0.0.5") == "lo"


if __name__ == "__main__":
    meet(sys.argv[1])
