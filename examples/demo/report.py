"""Turns the runs' records into the demo's table: what was measured, and what the plan had said."""
from collections.abc import Callable

MIB = 2**20
GIB = 2**30
COLUMNS = ["run", "device peak", "(plan)", "host memory", "(plan)", "s/step", "first loss", "last loss"]


def device_peak(record: dict) -> int:
    """The most device memory that was ever in use, in bytes."""
    return record["memory"]["device"]["peak"]


def host_peak(record: dict) -> int:
    """The most host memory that Pannier mapped, in bytes."""
    return record["memory"]["host"]["peak"]


def planned(record: dict, tier: str) -> int:
    """What the plan says of a tier: its own part before the first step, activations added as the first step showed them."""
    return record["plan_after"][tier]["total"]


def cap_between(high: int, low: int) -> str:
    """A cap halfway between two peaks, as the configuration writes it."""
    return f"{(high + low) // 2 // MIB}MiB"


def cap_bytes(cap: str) -> int:
    """What `cap_between` wrote, in bytes."""
    return int(cap.removesuffix("MiB")) * MIB


def shown(cap: str) -> str:
    """What `cap_between` wrote, as the table shows sizes."""
    return size(cap_bytes(cap))


def seconds_per_step(record: dict) -> float:
    """The median over all steps but the first, which also warms up."""
    seconds = sorted(step["seconds"] for step in record["steps"][1:] or record["steps"])
    return seconds[len(seconds) // 2]


def size(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f} GiB"


def rows(records: list[dict]) -> list[list[str]]:
    """The table's cells, a row a run."""
    return [_row(record) for record in records]


def _row(record: dict) -> list[str]:
    if "error" in record:
        return [record["title"], "out of memory", *["-"] * (len(COLUMNS) - 2)]
    losses = [step["loss"] for step in record["steps"]]
    return [record["title"], size(device_peak(record)), size(planned(record, "device")), size(host_peak(record)),
            size(planned(record, "host")), f"{seconds_per_step(record):.2f}", f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]


def text_table(records: list[dict]) -> str:
    """The table for a terminal."""
    table = [COLUMNS, *rows(records)]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    align: list[Callable[[str, int], str]] = [str.ljust] + [str.rjust] * (len(COLUMNS) - 1)
    lines = ["  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)) for row in table]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines) + "\n"


def markdown_table(records: list[dict]) -> str:
    """The same table for a page."""
    lines = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1), *rows(records)]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)
