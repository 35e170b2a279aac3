"""DeepSpeed's names, served by Pannier. What Pannier doesn't have is missing here, and says so when asked for."""

import functools
import importlib
from typing import Any

import torch

import pannier
from pannier import ConfigError as DeepSpeedConfigError
from pannier import Engine as DeepSpeedEngine
from pannier import Optimizer as DeepSpeedOptimizer
from pannier import add_config_arguments, partition_names

from . import accelerator, checkpoint, comm, ops, runtime, utils
from .accelerator import get_accelerator
from .comm import init_distributed
from .git_version_info import git_branch as __git_branch__
from .git_version_info import git_hash as __git_hash__
from .git_version_info import version as __version__
from .missing import explain, watch
from .runtime import zero
from .runtime.config import DeepSpeedConfig
from .runtime.activation_checkpointing import checkpointing
from .utils import OnDevice, log_dist, logger

dist = comm
__version_major__, __version_minor__, __version_patch__ = 0, 19, 6

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "OnDevice",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "dist",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "is_compile_supported",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]


@functools.wraps(pannier.initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """`pannier.initialize`, after which there is a process group also for one rank, as scripts of DeepSpeed's expect. Files
    that the engine writes have DeepSpeed's names."""
    if kwargs.get("dist_init_required") is not False:
        init_distributed(distributed_port=kwargs.get("distributed_port", 29500))
    engine, *others = pannier.initialize(*args, **kwargs)
    engine.follows_deepspeed = True
    return engine, *others


def is_compile_supported() -> bool:
    """Whether torch.compile is there. Compile a model before `initialize`, at stages 0 to 2."""
    return hasattr(torch, "compile")


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(f"deepspeed.{name}"))


# Scripts reach these by their dotted names (`deepspeed.runtime.zero.stage3.X`) after `import deepspeed` alone.
for _name in (
    "constants",
    "runtime.base_optimizer",
    "runtime.bf16_optimizer",
    "runtime.constants",
    "runtime.fp16.fused_optimizer",
    "runtime.fp16.loss_scaler",
    "runtime.fp16.unfused_optimizer",
    "runtime.precision_config",
    "runtime.swap_tensor",
    "runtime.zero.config",
    "runtime.zero.offload_config",
    "runtime.zero.stage3",
    "runtime.zero.stage_1_and_2",
    "runtime.zero.utils",
    "utils.zero_to_fp32",
):
    importlib.import_module(f"{__name__}.{_name}")

partition_names.install()
watch()
