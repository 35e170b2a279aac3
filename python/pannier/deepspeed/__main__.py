"""`python -m pannier.deepspeed script.py ARGUMENTS`, or `-m module ARGUMENTS`; with flags of DeepSpeed's launcher, several
ranks of it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from typing import NoReturn

from pannier import deepspeed
from pannier.deepspeed import launcher

_USAGE = """usage: python -m pannier.deepspeed [-m MODULE | SCRIPT] ARGUMENTS...
       python -m pannier.deepspeed [--num_gpus N] [--num_nodes N] [--hostfile FILE] [--node_rank N] [--master_addr A]
                                   [--master_port P] [--module] SCRIPT ARGUMENTS..."""


def _fail(message: str) -> NoReturn:
    print(f"pannier.deepspeed: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _require_script(path: str) -> None:
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            _fail(f"can't run folder {path!r}: there is no __main__.py in it")
        return
    try:
        os.stat(path)
        if os.path.isfile(path):  # A pipe can be opened only once.
            with open(path, "rb"):
                pass
    except OSError as error:
        _fail(f"can't open script {path!r}: {error.strerror}")


def _require_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # A package around the module is there, but lacks something itself.
        found = None
    if found is None:
        _fail(f"can't find module {name!r}")


def main() -> None:
    """Installs the stand-in and becomes the program."""
    arguments = sys.argv[1:]
    if not arguments or arguments in (["-m"], ["-h"], ["--help"]):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    if arguments[0].startswith("-") and arguments[0] != "-m":
        launcher.main(arguments)
    deepspeed.install()
    if arguments[0] == "-m":
        _require_module(arguments[1])
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        _require_script(arguments[0])
        sys.argv = arguments
        # As Python does for a script: its own folder is found first.
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
