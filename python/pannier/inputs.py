"""What a 16-bit engine does to the module beside its parameters: buffers, and inputs where the config asks for it.

As DeepSpeed does: floating inputs are cast only with `fp16.auto_cast`, and buffers keep their dtype (rotary tables need
fp32) unless `data_types.buffer_dtype` names one. One exception: running statistics follow the parameters of their
batch norm, since torch's CPU kernels refuse the mix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from pannier.config_values import ConfigValues

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def prepare(module: torch.nn.Module, values: ConfigValues) -> RemovableHandle | None:
    """Casts buffers, and has floating inputs cast, as the configuration says. Returns the hook on `module`, if any."""
    wanted = _wanted_dtype(values)
    for part in module.modules():
        dtype = wanted
        if dtype is None and isinstance(part, _NormBase) and values.get_data_types()[0] is not torch.float32:
            dtype = values.get_data_types()[0]
        for buffer in part.buffers(recurse=False) if dtype is not None else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    if values.fp16_auto_cast():
        return module.register_forward_pre_hook(_cast_hook, with_kwargs=True)
    return None


def _wanted_dtype(values: ConfigValues) -> torch.dtype | None:
    section = values.config.get("data_types") or {}
    return _DTYPES.get(section.get("buffer_dtype") or "")


# A plain function without an engine in it, so that the module still copies and pickles.
def _cast_hook(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return to_half(args), to_half(kwargs)


def to_half(value: Any) -> Any:
    """`value` with every floating tensor in it, however nested in lists, tuples and dicts, as fp16."""
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_half(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_half(item) for item in value)
    if isinstance(value, dict):
        return {key: to_half(item) for key, item in value.items()}
    return value
