"""`python -m pannier.deepspeed script.py ARGUMENTS`, or `-m module ARGUMENTS`."""

from __future__ import annotations

import os
import runpy
import sys

from pannier import deepspeed

_USAGE = "usage: python -m pannier.deepspeed [-m MODULE | SCRIPT] ARGUMENTS..."


def main() -> None:
    """Installs the stand-in and becomes the program."""
    arguments = sys.argv[1:]
    if not arguments or arguments in (["-m"], ["-h"], ["--help"]):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    deepspeed.install()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            # As Python does for a script: its own folder is found first.
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("deepspeed."):
            raise ModuleNotFoundError(
                f"{error}: `deepspeed` is Pannier here, which has no such module", name=error.name, path=error.path
            ) from error
        raise


if __name__ == "__main__":
    main()
