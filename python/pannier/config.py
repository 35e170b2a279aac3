"""Where a configuration comes from: a dict, a path, a text of JSON, plain or in base64, or `args.deepspeed_config`.

Only finding the text happens here. Reading it, its defaults and its errors are the core's (pannier/engine/config.h);
a dict is handed over as JSON, so the caller's own is never changed.
"""

from __future__ import annotations

import base64
import binascii
import enum
import importlib.util
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pannier import core, lr_schedules
from pannier.config_values import ConfigValues
from pannier.errors import ConfigError, IoError
from pannier.fixed_values import fixed

_log = logging.getLogger("pannier")
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_said: set[str] = set()  # Notes that were logged once; a process-wide memory is what "once" means.


class Config(ConfigValues):
    """A configuration as the core read it, and its values as the dict that `engine.config` shows."""

    def __init__(self, text: str, origin: str, *, brings_optimizer: bool, brings_scheduler: bool) -> None:
        self.torch_scheduler: tuple[str, dict[str, Any]] | None = None
        self._given: dict[str, Any] = {}
        try:
            text = self._leave_out(text, brings_optimizer, brings_scheduler)
            self.core = core.new_config(text)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}" if origin else str(error)) from None
        for note in core.call(self.core.notes):
            if note not in _said:
                _said.add(note)
                _log.warning("%s", note)
        self._read_back()

    def require_resolved(self) -> None:
        """Raises where a key was left "auto" that decides something for what is built from the sections."""
        core.call(self.core.require_resolved, "optimizer" in self.config, "scheduler" in self.config)

    def resolve_batch(self, world_size: int, loader_batch: int) -> None:
        """Completes the three batch sizes; `loader_batch` is 0 where it is not known."""
        core.call(self.core.resolve_batch, world_size, loader_batch)
        self._read_back()

    @property
    def config(self) -> dict[str, Any]:
        """The values, with all defaults filled in; keys without effect show as they were given. Not to be changed."""
        return self._values

    def set_batch(self, train: int, micro: int, steps: int) -> None:
        """Shows other batch sizes."""
        sizes = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        self._values = fixed({**self._values, **sizes})

    def _read_back(self) -> None:
        values = _merged(self._given, json.loads(core.call(self.core.json)))
        if self.torch_scheduler is not None:
            kind, params = self.torch_scheduler
            values["scheduler"] = {"type": kind, "params": params}
        self._values: dict[str, Any] = fixed(values)

    def _leave_out(self, text: str, brings_optimizer: bool, brings_scheduler: bool) -> str:
        # What the caller brings has priority over the sections, and a scheduler of torch's is built here, not in the
        # core. A text that can't be read goes to the core as it is, which says what is wrong with it.
        try:
            values = json.loads(_without_comments(text), object_pairs_hook=_once_each)
        except ValueError:
            return text
        except RecursionError:
            raise ConfigError("the configuration is nested too deeply to be read") from None
        if not isinstance(values, dict):
            return text
        if not brings_optimizer:
            _require_type(values.get("optimizer"))
        scheduler = values.get("scheduler")
        kind = scheduler.get("type") if isinstance(scheduler, dict) else None
        is_torch = isinstance(kind, str) and _is_torch_scheduler(kind)
        if is_torch and not brings_scheduler:
            self.torch_scheduler = (str(kind), values["scheduler"].get("params") or {})
        left_out = {"optimizer"} if brings_optimizer else set()
        left_out |= {"scheduler"} if brings_scheduler or is_torch else set()
        self._given = {key: value for key, value in values.items() if key not in left_out}
        if left_out.isdisjoint(values):
            return text
        return json.dumps(self._given)


def _merged(given: Any, read: Any) -> Any:
    """`read`, and what else was `given`."""
    if not isinstance(given, dict) or not isinstance(read, dict):
        return read
    both = {key: _merged(given[key], value) if key in given else value for key, value in read.items()}
    return {**given, **both}


def find(args: Any, config: Any, config_params: Any) -> tuple[str, str]:
    """The JSON text of the configuration, and where it came from (for messages; empty for a dict)."""
    if config is None:
        config = config_params
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is None:
        from_args = getattr(args, "deepscale_config", None)
    if from_args is not None:
        if config is not None:
            raise ConfigError("the configuration is given twice: by args.deepspeed_config and by config")
        config = from_args
    if config is None:
        raise ConfigError("no configuration: pass config (a dict or a path) or args.deepspeed_config")
    if isinstance(config, Mapping):
        return _dumped(config), ""
    if isinstance(config, (str, os.PathLike)):
        return _read(os.fspath(config))
    raise ConfigError(f"config must be a dict, a path or a text of JSON, not {type(config).__name__}")


def _dumped(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(_plain(config, ""))
    except RecursionError:
        raise ConfigError("config cannot be written as JSON: it is nested too deeply, or holds itself") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config cannot be written as JSON: {error}") from None


def _plain(value: Any, path: str) -> Any:
    # What people put into dicts beside JSON's own types: numpy's numbers and arrays, tensors, enumerations, paths, and the
    # mappings and lists of other configuration libraries.
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return _plain(value.value, path)
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{path}: NaN is not a value")
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "tolist"):
        return _plain(value.tolist(), path)
    if hasattr(value, "item"):
        try:
            return value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{path}: {type(value).__name__} is not a single value: {error}") from None
    raise TypeError(f"{path} is of type {type(value).__name__}: {value!r}")


def _read(config: str) -> tuple[str, str]:
    if os.path.exists(config):
        try:
            with open(config, encoding="utf-8-sig") as file:  # Some editors begin a file with a byte order mark.
                return _from_hjson(file.read()), config
        except OSError as error:
            raise IoError(error.errno, f"cannot read the configuration: {error.strerror}", config) from None
        except UnicodeDecodeError:
            raise ConfigError(f"{config}: not a text file") from None
    if config.lstrip().startswith(("{", "//", "/*")):
        return _from_hjson(config), ""
    try:
        text = base64.urlsafe_b64decode(config).decode("utf-8-sig")
        json.loads(_without_comments(text))
    except RecursionError:
        raise ConfigError("config (base64): nested too deeply to be read") from None
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise ConfigError(f"config is neither a file that exists nor JSON, plain or in base64: {config!r}") from None
    return text, "config (base64)"


def _from_hjson(text: str) -> str:
    # DeepSpeed's files may be Hjson; where that package is installed they may be here. JSON stays as it is, so that
    # messages about it are the core's.
    try:
        json.loads(_without_comments(text))
    except RecursionError:
        return text
    except ValueError:
        if not text.strip() or importlib.util.find_spec("hjson") is None:  # Hjson takes nothing at all for no keys.
            return text
        hjson = importlib.import_module("hjson")
        try:
            values = hjson.loads(text)
        except (ValueError, RecursionError):
            return text
        return json.dumps(values) if isinstance(values, dict) else text
    return text


def _without_comments(text: str) -> str:
    return _COMMENT.sub(lambda match: match.group(1) or "", text)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")  # The core says which.
    return values


def _require_type(section: Any) -> None:
    if not isinstance(section, dict) or section.get("type") is not None:
        return
    if not section or any(value is not None for value in section.values()):
        raise ConfigError("optimizer.type is missing; name an optimizer, or leave the section out")


def _is_torch_scheduler(name: str) -> bool:
    if name in lr_schedules.VALID_LR_SCHEDULES:
        return False
    found = getattr(torch.optim.lr_scheduler, name, None)
    base = torch.optim.lr_scheduler.LRScheduler
    is_abstract = found is base or name == "_LRScheduler"
    return isinstance(found, type) and issubclass(found, base) and not is_abstract
