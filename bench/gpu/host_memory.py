"""What a process takes of host memory, as the kernel counts it.

Pages that a driver pinned may be in no process's resident set, so the machine's own count is read too: MemTotal less
MemAvailable. (MemTotal alone is no measure: a virtual machine may be given its memory bit by bit.)
"""

from __future__ import annotations

import contextlib
import pathlib

GIB = 1024**3


def used_nbytes() -> int:
    """Bytes of the machine's memory that are neither free nor reclaimable."""
    fields = _fields("/proc/meminfo")
    return fields.get("MemTotal", 0) - fields.get("MemAvailable", 0)


def of_process(used_before: int) -> dict[str, float]:
    """This process's memory in GiB: peak and present resident set, shares, locked, and the machine's growth."""
    status, shares = _fields("/proc/self/status"), _fields("/proc/self/smaps_rollup")
    nbytes = {
        "host_peak_rss_gib": status.get("VmHWM", 0),
        "host_rss_gib": status.get("VmRSS", 0),
        "host_rss_shared_gib": status.get("RssShmem", 0),
        "host_locked_gib": status.get("VmLck", 0),
        "host_pinned_gib": status.get("VmPin", 0),
        "host_pss_gib": shares.get("Pss", 0),
        "host_used_gib": used_nbytes() - used_before,
    }
    return {name: round(value / GIB, 3) for name, value in nbytes.items()}


def peak_of_process(*, reset: bool = False) -> int:
    """Bytes of the process's largest resident set so far; with `reset`, the largest becomes the present one first."""
    if reset:
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _fields("/proc/self/status").get("VmHWM", 0)


def offer_to_the_kernel() -> None:
    """Where the machine runs out of memory, this process is the one to end, not its parent."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _fields(path: str) -> dict[str, int]:
    # Lines such as "VmHWM:   1234 kB"; others are left out.
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found
