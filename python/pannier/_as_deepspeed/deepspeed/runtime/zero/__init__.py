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

_INSTEAD = {
    "TiledLinear": "torch.nn.Linear",
    "TiledLinearReturnBias": "torch.nn.Linear",
    "MiCS_Init": "zero.Init",
    "unwrap_model_for_generation": "engine.module",
}


def __getattr__(name: str) -> Any:
    instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"deepspeed.zero is Pannier's here, which has no {name}{instead}")
