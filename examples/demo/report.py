"""Turns the runs' records into the demo's table: what was measured, and beside it what the plan had said."""

import pathlib

MIB = 2**20
GIB = 2**30
OWNERS = {
    "device": ["parameters", "gradients", "optimizer states", "streamed states", "activations"],
    "host": ["optimizer states", "gradients"],
}
NOTE = "* before activations, which are the model's own and known only after the first step"


def device_peak(record: dict) -> int:
    """The most device memory that was ever in use, in bytes: while the engine was built, too."""
    return max(record[when]["device"]["peak"] for when in ("memory_at_start", "memory"))


def cap_between(high: int, low: int) -> str:
    """A cap halfway between two peaks, as the configuration writes it."""
    return f"{(high + low) // 2 // MIB}MiB"


def cap_bytes(cap: str) -> int:
    """What `cap_between` wrote, in bytes."""
    return int(cap.removesuffix("MiB")) * MIB


def shown(cap: str) -> str:
    """What `cap_between` wrote, as the table shows sizes."""
    return size(cap_bytes(cap))


def size(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f} GiB" if nbytes else "0"


def processor() -> str:
    """The processor's name."""
    names = [
        line.split(":", 1)[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else "unnamed processor"


def seconds_per_step(record: dict) -> float:
    """The median over all steps but the first, which also warms up."""
    seconds = sorted(step["seconds"] for step in record["steps"][1:] or record["steps"])
    return seconds[len(seconds) // 2]


def _cells(record: dict, tier: str, owner: str | None) -> list[str]:
    """Measured and planned bytes of an owner at its peak, or of a whole tier; one cell for a run that ended early."""
    if "error" in record:
        return ["out of memory" if (tier, owner) == ("device", None) else "-"]
    memory, plan = record["memory"][tier], record["plan"][tier]
    if owner is None:
        return [
            size(device_peak(record) if tier == "device" else memory["peak"]),
            size(plan["total"]) + ("*" if tier == "device" else ""),
        ]
    measured = memory["by_owner"].get(owner, {"peak": 0})["peak"]
    return [size(measured), size(plan[owner]) if owner in plan else "-"]


def rows(records: list[dict]) -> list[list[list[str]]]:
    """The table: a row a figure, which is its label and then the cells of each run."""
    table = []
    for tier, owners in OWNERS.items():
        for owner in [None, *owners]:
            label = f"{tier} memory, peak" if owner is None else f"  {owner}"
            table.append([[label], *(_cells(record, tier, owner) for record in records)])
    figures = {
        "seconds a step": lambda record: f"{seconds_per_step(record):.2f}",
        "first loss": lambda record: f"{record['steps'][0]['loss']:.4f}",
        "last loss": lambda record: f"{record['steps'][-1]['loss']:.4f}",
    }
    for label, figure in figures.items():
        table.append([[label], *(["-"] if "error" in record else [figure(record), ""] for record in records)])
    return table


def text_table(records: list[dict]) -> str:
    """The table for a terminal."""
    table = [
        [[""], *(["measured"] if "error" in record else ["measured", "plan"] for record in records)],
        *rows(records),
    ]
    titles = ["", *(record["title"] for record in records)]
    head, lines = [], [[] for _ in table]
    for index, title in enumerate(titles):
        widths = [max(len(row[index][part]) for row in table) for part in range(len(table[0][index]))]
        widths[0] += max(
            0, len(title) - sum(widths) - 3 * (len(widths) - 1)
        )  # The title stands over all of its run's cells.
        head.append(title.rjust(sum(widths) + 3 * (len(widths) - 1)))
        for line, row in zip(lines, table, strict=True):
            line += [
                cell.rjust(width) if index else cell.ljust(width)
                for cell, width in zip(row[index], widths, strict=True)
            ]
    return "\n".join(["   ".join(head), *("   ".join(line).rstrip() for line in lines), NOTE]) + "\n"


def markdown_table(records: list[dict]) -> str:
    """The same table for a page."""
    head = [[""], *([record["title"]] if "error" in record else [record["title"], "plan"] for record in records)]
    lines = [" | ".join(cell for cells in row for cell in cells) for row in [head, *rows(records)]]
    lines.insert(1, " | ".join(["---"] + ["---:"] * (sum(map(len, head)) - 1)))
    return "".join(f"| {line} |\n".replace("|   ", "| &nbsp;&nbsp;") for line in lines) + f"\n\\{NOTE}\n"
