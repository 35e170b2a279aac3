"""How ranks find each other: one store that rank 0 serves, at which each rank says which run it is of.

Two runs on one address would join crosswise and train without an error; a rank that is missing, or an address that can't be
reached, would be waited for in silence. Both are said here, before torch's process group is made.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

from pannier.errors import CollectiveError, ConfigError

__all__ = ["interface_to", "join", "run_id"]

# What names a run, by who started it. torchrun's own name is "none" where nobody gave it one.
_RUN_VARIABLES = (
    ("TORCHELASTIC_RUN_ID",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMIX_NAMESPACE",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_SIOCGIFADDR = 0x8915
_joins = 0  # Of this process; the same on every rank.


def run_id(world_size: int) -> str:
    """What this rank's run is called; equal on all its ranks, and another for another run as far as the starter tells."""
    for variables in _RUN_VARIABLES:
        if all(os.environ.get(variable) for variable in variables):
            names = " ".join(f"{variable}={os.environ[variable]}" for variable in variables)
            return f"{names}, {world_size} ranks"
    return f"{world_size} ranks"


def join(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of all ranks at MASTER_ADDR and MASTER_PORT, once every rank of this run has come there.

    Raises ConfigError for an address that rank 0 cannot serve, or that another run uses; CollectiveError, naming them, for
    ranks that do not come within `timeout`, and where rank 0 is not reached.
    """
    global _joins
    _joins += 1
    end = time.monotonic() + timeout.total_seconds()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store = _connect(rank, world_size, timeout, address)
    mine = run_id(world_size)
    theirs = store.compare_set("pannier/run", "", mine).decode()
    if theirs != mine:
        raise ConfigError(
            f"rank {rank} of the run ({mine}) reached the run ({theirs}) at {address}; give each run a MASTER_PORT of its own"
        )
    place = f"pannier/join/{_joins}"
    if store.add(f"{place}/claims/{rank}", 1) > 1:
        raise ConfigError(
            f"another process is rank {rank} of the run ({mine}) at {address} already; give each run a MASTER_PORT of its own"
        )
    store.set(f"{place}/{rank}", "here")
    missing = set(range(world_size))
    while missing := {other for other in missing if not store.check([f"{place}/{other}"])}:
        if time.monotonic() > end:
            raise CollectiveError(
                f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))} of {world_size} did not come to "
                f"{address} within {timeout.total_seconds():g} s"
            )
        time.sleep(0.02)
    return dist.PrefixStore(f"{place}/{mine}", store)


def _connect(rank: int, world_size: int, timeout: timedelta, address: str) -> dist.Store:
    # torchrun's agent serves the store, for all attempts of a run.
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store: dist.Store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=rank == 0 and not of_agent,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if rank == 0 and not of_agent:
            raise ConfigError(f"rank 0 cannot be reached at {address}, where MASTER_ADDR and MASTER_PORT say: {reason}") from None
        raise CollectiveError(
            f"rank {rank} did not reach rank 0 at {address} within {timeout.total_seconds():g} s: {reason}"
        ) from None
    if of_agent:
        return dist.PrefixStore(f"pannier/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


def interface_to(host: str) -> str | None:
    """The network interface on the route to a machine; None where that can't be told.

    Gloo left alone takes the one that the machine's own name resolves to, which the others may not reach.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # Sends nothing: it only chooses the route.
            own = probe.getsockname()[0]
    except OSError:
        return None
    interfaces = _ipv4_interfaces() if family == socket.AF_INET else _ipv6_interfaces()
    if own.startswith("127.") and own not in interfaces:
        return "lo"
    return interfaces.get(own)


def _ipv4_interfaces() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()))
            try:
                fcntl.ioctl(probe, _SIOCGIFADDR, request, True)
            except OSError:
                continue  # One without an address.
            found[socket.inet_ntoa(request.tobytes()[20:24])] = name
    return found


def _ipv6_interfaces() -> dict[str, str]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return {}
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])): row[5] for row in rows}
