"""Names of the section `zero_optimization`."""

from enum import IntEnum
from typing import Any

from ..config_sections import read_section

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(IntEnum):
    """What is partitioned over ranks; DeepSpeed's checkpoints hold it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig:
    """The section of those values, with its defaults filled in; its keys are attributes."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(vars(read_section(ZERO_OPTIMIZATION, values)))


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """The section of a whole configuration."""
    return DeepSpeedZeroConfig(**(param_dict.get(ZERO_OPTIMIZATION) or {}))


__all__ = ["DeepSpeedZeroConfig", "ZERO_OPTIMIZATION", "ZeroStageEnum", "get_zero_config"]
