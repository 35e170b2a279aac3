"""The `pannier` command of the wheel: replaces itself by the C++ program that the package carries."""

from __future__ import annotations

import os
import pathlib
import sys

import torch


def main() -> None:
    """Runs the program with this process's arguments."""
    program = pathlib.Path(__file__).parent / "bin" / "pannier"
    # The program finds torch beside the package by its run path; elsewhere (a target folder of its own) it needs the hint.
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{libraries}:{before}" if before else str(libraries)
    os.execv(program, [str(program), *sys.argv[1:]])
