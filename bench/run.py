"""Runs the benches: `./dev bench [update|step|nvme|checkpoint]`. Each verifies first, then prints JSON lines and a sentence a figure.

A speed is the median of alternating pairs (ours, the peer) in one process on the same threads, given as a ratio.
"""

from __future__ import annotations

import argparse
import importlib
import sys

BENCHES = ("update", "step", "nvme", "checkpoint")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=BENCHES, help="default: all")
    arguments, rest = parser.parse_known_args()
    status = 0
    for name in [arguments.name] if arguments.name else BENCHES:
        status |= importlib.import_module(f"bench_{name}").main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
