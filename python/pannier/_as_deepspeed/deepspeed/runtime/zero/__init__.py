"""ZeRO's helpers."""

from typing import Any

from pannier.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

from ...missing import explain
from . import partition_parameters

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"deepspeed.runtime.zero.{name}"))
