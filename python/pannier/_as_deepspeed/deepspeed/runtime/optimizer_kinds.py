"""DeepSpeed's classes of optimizers, told apart by `isinstance`: the one class that the engine returns is each of them
where DeepSpeed would return it."""

from collections.abc import Callable

import torch

from pannier import Engine, Optimizer
from pannier.descriptors import FusedAdam


class _Kind(type):
    """A class that has for instances the optimizers of some engines."""

    is_of: Callable[[Engine], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        engine = instance.bound_engine() if isinstance(instance, Optimizer) else None
        return engine is not None and cls.is_of(engine)


def _kind(name: str, is_of: Callable[[Engine], bool]) -> type:
    return _Kind(name, (), {"is_of": staticmethod(is_of)})


def _stage(engine: Engine) -> int:
    return engine.zero_optimization_stage()


def _is_16_bits(engine: Engine) -> bool:
    return engine.get_data_types()[0] in (torch.float16, torch.bfloat16)


def _is_fused(engine: Engine) -> bool:
    return engine.optimizer is not None and isinstance(engine.optimizer.optimizer, FusedAdam)


# In fp32 at stage 0 DeepSpeed returns the caller's own.
DeepSpeedOptimizer = _kind("DeepSpeedOptimizer", lambda engine: _stage(engine) > 0 or _is_16_bits(engine))
ZeROOptimizer = _kind("ZeROOptimizer", lambda engine: _stage(engine) > 0)
DeepSpeedZeroOptimizer = _kind("DeepSpeedZeroOptimizer", lambda engine: _stage(engine) in (1, 2))
DeepSpeedZeroOptimizer_Stage3 = _kind("DeepSpeedZeroOptimizer_Stage3", lambda engine: _stage(engine) == 3)
FP16_Optimizer = _kind("FP16_Optimizer", lambda engine: _stage(engine) == 0 and _is_16_bits(engine) and _is_fused(engine))
FP16_UnfusedOptimizer = _kind(
    "FP16_UnfusedOptimizer", lambda engine: _stage(engine) == 0 and _is_16_bits(engine) and not _is_fused(engine)
)
# DeepSpeed's for fp32 sums at stage 1; they are asked about for what they keep inside, which is not there.
BF16_Optimizer = _kind("BF16_Optimizer", lambda engine: False)
