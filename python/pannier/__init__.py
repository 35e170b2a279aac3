"""Pannier trains PyTorch models whose training state does not fit in device memory.

>>> engine, optimizer, loader, scheduler = pannier.initialize(model=model, config=config)
>>> loss = engine(batch); engine.backward(loss); engine.step()

Importing it loads the C++ core; from then on torch's CPU allocations are counted as device memory.
"""

from pannier import core as _core

_core.load()

from pannier import comm, lr_schedules, zero
from pannier.arguments import add_config_arguments
from pannier.comm import init_distributed
from pannier.descriptors import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from pannier.engine import Engine
from pannier.errors import CollectiveError, ConfigError, InternalError, IoError, OutOfMemoryError, UsageError
from pannier.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from pannier.initialization import initialize
from pannier.loader import Loader, RepeatingLoader
from pannier.optimizer import Optimizer

__all__ = [
    "CollectiveError",
    "ConfigError",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "Engine",
    "FusedAdam",
    "FusedLion",
    "InternalError",
    "IoError",
    "Loader",
    "Optimizer",
    "OutOfMemoryError",
    "Plan",
    "RepeatingLoader",
    "UsageError",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "lr_schedules",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_update_full_grad_vectorized",
    "zero",
]

__version__ = "0.1.0"
