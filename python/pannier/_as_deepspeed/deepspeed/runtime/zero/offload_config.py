"""Where states rest, by the names of the configuration."""

from enum import Enum
from typing import Any

from ..config_sections import read_section


class OffloadDeviceEnum(str, Enum):
    """A home."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """A kind of state."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig:
    """The section `offload_param`, with its defaults filled in."""

    def __init__(self, **values: Any) -> None:
        found = read_section("zero_optimization.offload_param", values, zero_optimization={"stage": 3})
        vars(self).update(vars(found))


class DeepSpeedZeroOffloadOptimizerConfig:
    """The section `offload_optimizer`, with its defaults filled in."""

    def __init__(self, **values: Any) -> None:
        found = read_section("zero_optimization.offload_optimizer", values, zero_optimization={"stage": 3})
        vars(self).update(vars(found))


__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum", "OffloadStateTypeEnum"]
