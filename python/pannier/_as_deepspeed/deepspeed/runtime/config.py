"""The configuration, read apart from an engine."""

import json
import os
from collections.abc import Mapping
from typing import Any

import pannier.config
from pannier import ConfigError as DeepSpeedConfigError
from pannier import comm

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LION_OPTIMIZER = "lion"
DEEPSPEED_OPTIMIZERS = [ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER]

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "LION_OPTIMIZER",
    "get_gradient_clipping",
]


class DeepSpeedConfig:
    """A configuration with its defaults filled in; its top-level keys are attributes."""

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        text, origin = pannier.config.find(None, config, None)
        read = pannier.config.Config(text, origin, brings_optimizer=False, brings_scheduler=False)
        self.world_size = comm.get_world_size()
        read.resolve_batch(self.world_size, 0)
        self._param_dict = json.loads(json.dumps(read.config))

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_param_dict", {})
        if name in values:
            return values[name]
        raise AttributeError(f"the configuration has no {name}")


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The greatest norm that `param_dict` asks for, or the default."""
    return DeepSpeedConfig({"train_batch_size": comm.get_world_size(), **param_dict}).gradient_clipping
