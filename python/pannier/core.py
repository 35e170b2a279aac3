"""The way into the C++ core: loads the library and turns its errors into Python's.

Every call goes through `call`, so that an error arrives as one of `pannier.errors` with nothing of the crossing in its
traceback. The library is `$PANNIER_LIBRARY_DIR/libpannier.so` where that is set, else the one beside this file.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pannier.errors import CollectiveError, ConfigError, InternalError, IoError

_Result = TypeVar("_Result")
_IO_PREFIX = re.compile(r"^\[pannier:io:(\d+)\] ?")
_PREFIXES = {"[pannier:internal] ": InternalError, "[pannier:collective] ": CollectiveError}


def library_path() -> pathlib.Path:
    """Where the core's library is expected."""
    folder = os.environ.get("PANNIER_LIBRARY_DIR")
    return pathlib.Path(folder) / "libpannier.so" if folder else pathlib.Path(__file__).parent / "lib" / "libpannier.so"


def load() -> None:
    """Loads the core. From then on torch's CPU allocations are counted."""
    path = library_path()
    if not path.is_file():
        raise ImportError(f"Pannier's library is not at {path}; set PANNIER_LIBRARY_DIR to the folder that holds it")
    torch.classes.load_library(str(path))


def call(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls into the core."""
    try:
        return function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError) as error:
        raise translated(error) from None


def translated(error: Exception) -> Exception:
    """The error of `pannier.errors` for one that the core threw; any other error as it is."""
    message = str(error)
    if type(error) is ValueError:
        return ConfigError(message)
    if type(error) is RuntimeError:
        if io_error := _IO_PREFIX.match(message):
            return IoError(int(io_error.group(1)), message[io_error.end() :])
        for prefix, kind in _PREFIXES.items():
            if message.startswith(prefix):
                return kind(message.removeprefix(prefix))
    return error


def lost_ranks(engine: Any) -> CollectiveError | None:
    """Why the ranks of a core engine can't go on together; None where they can."""
    try:
        call(engine.check_ranks)
    except CollectiveError as error:
        return error
    return None


def new_config(text: str) -> Any:
    """Reads a configuration's JSON text."""
    return call(torch.classes.pannier.Config, text)


def new_engine(*arguments: Any) -> Any:
    """Builds a core engine; nothing of the model has changed when it raises."""
    return call(torch.classes.pannier.Engine, *arguments)


def new_schedule(kind: str, params_json: str, base_lrs: list[float]) -> Any:
    """Builds a learning-rate schedule."""
    return call(torch.classes.pannier.Schedule, kind, params_json, base_lrs)


def open_checkpoint(folder: str, tag: str) -> Any:
    """A checkpoint's tensors and attributes; "" is the latest tag."""
    return call(torch.classes.pannier.CheckpointFile, folder, tag)


def new_checkpoint(
    folder: str, tag: str, names: list[str], types: list[torch.dtype], shapes: list[list[int]]
) -> Any:
    """A checkpoint that is to be made of whole tensors, which come in this order."""
    return call(torch.classes.pannier.CheckpointBuilder, folder, tag, names, types, shapes)


def consolidate(folder: str, tag: str, out: str, dtype: str, max_shard_size: str) -> list[str]:
    """Makes a Hugging Face model of a checkpoint, and returns its files."""
    return call(torch.ops.pannier.consolidate, folder, tag, out, dtype, max_shard_size)


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB"."""
    return call(torch.ops.pannier.parse_size, text)
