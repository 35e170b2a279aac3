"""Names of the section `zero_optimization`."""

from enum import IntEnum

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(IntEnum):
    """What is partitioned over ranks; DeepSpeed's checkpoints hold it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


__all__ = ["ZERO_OPTIMIZATION", "ZeroStageEnum"]
