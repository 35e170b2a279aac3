"""What a checkpoint keeps of Python's side, as bytes: pickles that torch's loader reads without running anybody's code."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import sys
import types
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pannier.errors import ConfigError, UsageError


def rebuild_deque(items: Iterable[Any], maxlen: int | None) -> collections.deque[Any]:
    """A deque out of what torch's loader can read of one."""
    return collections.deque(items, maxlen)


def rebuild_defaultdict(factory: Any, items: Mapping[Any, Any]) -> collections.defaultdict[Any, Any]:
    """A defaultdict out of what torch's loader can read of one."""
    return collections.defaultdict(factory, items)


class Pickler(pickle.Pickler):
    """Writes containers that torch's loader does not fill as calls that it makes."""

    def reducer_override(self, value: Any) -> Any:
        """Of these types alone, not of classes made from them."""
        if type(value) is collections.deque:
            return rebuild_deque, (list(value), value.maxlen)
        if type(value) is collections.defaultdict:
            return rebuild_defaultdict, (value.default_factory, dict(value))
        return NotImplemented


# What client states are commonly made of, besides what torch allows anyway.
_SAFE = [argparse.Namespace, types.SimpleNamespace, pathlib.PosixPath, pathlib.PurePosixPath]
_SAFE += [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone]
_SAFE += [decimal.Decimal, fractions.Fraction, uuid.UUID, uuid.SafeUUID, frozenset, range, slice]
_SAFE += [rebuild_deque, rebuild_defaultdict, collections.deque, int, float, bool, str, list, tuple, dict]


def pack(values: Mapping[str, Any]) -> torch.Tensor:
    """Pickles, and sees to it that it can be read again."""
    stream = io.BytesIO()
    try:
        torch.save(dict(values), stream, pickle_module=sys.modules[__name__])
    except Exception as error:  # Of whatever kind: objects choose by themselves how they say that they can't be saved.
        raise ConfigError(
            f"client_state, or another state to be saved, can't be pickled: {type(error).__name__}: {error}"
        ) from None
    packed = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    unpack(packed)
    return packed


def unpack(packed: torch.Tensor) -> dict[str, Any]:
    """Reads what `pack` wrote. Raises for objects of classes that nobody has allowed."""
    with torch.serialization.safe_globals(_safe_types()):
        try:
            return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error)).strip()
            raise UsageError(
                "client_state, or another state of the checkpoint, holds an object that can't be loaded without running "
                f"code of its own ({reason}); save plain values and tensors, or call "
                "torch.serialization.add_safe_globals([TheClass]) where you save and load"
            ) from None


def _safe_types() -> list[Any]:
    safe: list[Any] = list(_SAFE)
    if (numpy := sys.modules.get("numpy")) is not None:
        scalar = getattr(numpy, "_core", getattr(numpy, "core", None)).multiarray
        safe += [numpy.ndarray, numpy.dtype, scalar.scalar, scalar._reconstruct]
        safe += [type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefdFDUSMm"]
    return safe
