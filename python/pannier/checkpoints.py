"""Saving and loading: what Python adds to the core's checkpoint, and what it takes back.

The core writes tensors, step counts, loss scale and torch's random numbers. From here come the names of what is not
trained, and bytes: the caller's client state, the values of the parameter groups, the schedule, the loader's position.
"""

from __future__ import annotations

import argparse
import datetime
import io
import logging
import os
import pathlib
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pannier import core
from pannier.errors import ConfigError, UsageError
from pannier.group_values import hyperparameters

if TYPE_CHECKING:
    from pannier.config import Config
    from pannier.group_values import Fixed
    from pannier.optimizer import Optimizer

_log = logging.getLogger("pannier")
_COMMON, _OWN = "common", "own"
# What client states are commonly made of, besides what torch allows anyway.
_SAFE = [argparse.Namespace, types.SimpleNamespace, datetime.datetime, datetime.timedelta, pathlib.PosixPath]


class Checkpoints:
    """The part of an engine that saves and loads."""

    module: torch.nn.Module
    optimizer: Optimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    fixed_values: Fixed
    global_rank: int
    world_size: int
    _config: Config
    _params: list[torch.nn.Parameter]

    @property
    def core(self) -> Any:
        """The core's engine."""
        raise NotImplementedError

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] = {},  # noqa: B006  (never written to)
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves all that a resume needs into `save_dir`/`tag`; every rank calls it. It is on disk on return.

        `tag` is `global_step` and the number of steps where it is not given. `client_state` comes back from
        `load_checkpoint`. What was saved before stays whole whatever happens.
        """
        frozen, buffers = self._untrained()
        groups = [] if self.optimizer is None else hyperparameters(self.optimizer.param_groups, self.fixed_values)
        core.call(
            self.core.save_checkpoint,
            os.fspath(save_dir),
            "" if tag is None else str(tag),
            save_latest,
            exclude_frozen_parameters,
            groups,
            *([[], []] if exclude_frozen_parameters else [list(frozen), list(frozen.values())]),
            list(buffers),
            list(buffers.values()),
            self._aliases(),
            {_COMMON: _pack(self._common(client_state)), _OWN: _pack(self._own())},
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Loads what `save_checkpoint` saved, at whatever world size and stage; every rank calls it.

        Returns the path and the client state, or (None, {}) where no tag is given and `load_dir` has no `latest`.
        """
        if custom_load_fn is not None:
            raise NotImplementedError
        frozen, buffers = self._untrained()
        path, _, common, own, reports = core.call(
            self.core.load_checkpoint,
            os.fspath(load_dir),
            "" if tag is None else str(tag),
            load_module_strict,
            load_optimizer_states,
            load_module_only,
            list(frozen),
            list(frozen.values()),
            list(buffers),
            list(buffers.values()),
        )
        if not path:
            _log.warning("%s has no file 'latest', and no tag was given: nothing was loaded", load_dir)
            return None, {}
        self._report(path, *reports)
        saved = _unpack(common[_COMMON]) if _COMMON in common else {}
        _load_extra_states(self.module, saved.get("extra_states", {}))
        if load_module_only:
            return path, saved.get("client_state", {})
        if load_lr_scheduler_states and self.lr_scheduler is not None and saved.get("lr_scheduler") is not None:
            self.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if load_optimizer_states and self.optimizer is not None and "param_groups" in saved:
            _load_groups(self.optimizer.param_groups, saved["param_groups"])
        if _OWN in own:
            self._load_own(_unpack(own[_OWN]))
        return path, saved.get("client_state", {})

    def _untrained(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Frozen parameters and persistent buffers by name, each once."""
        trained = set() if self.optimizer is None else self.optimizer.state_indices.keys()
        frozen = {
            name: param.detach() for name, param in self.module.named_parameters() if id(param) not in trained
        }
        buffers: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, buffer in _persistent_buffers(self.module):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                buffers[name] = buffer
        return frozen, buffers

    def _aliases(self) -> dict[str, str]:
        """The other names of tied parameters and buffers."""
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        tensors = [*self.module.named_parameters(remove_duplicate=False), *_persistent_buffers(self.module)]
        for name, tensor in tensors:
            if first.setdefault(id(tensor), name) != name:
                aliases[name] = first[id(tensor)]
        return aliases

    def _common(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """What is the same on all ranks, or rank 0's."""
        if self.global_rank != 0:
            return {}
        scheduler = getattr(self.lr_scheduler, "state_dict", None)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {
            "client_state": dict(client_state or {}),
            "lr_scheduler": None if scheduler is None else scheduler(),
            "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "extra_states": _extra_states(self.module),
        }

    def _own(self) -> dict[str, Any]:
        """What each rank has for itself."""
        state = getattr(self.training_dataloader, "state_dict", None)
        return {
            "random": random.getstate(),
            "numpy": _numpy_state(),
            "loader": None if state is None else state(),
        }

    def _load_own(self, own: Mapping[str, Any]) -> None:
        random.setstate(own["random"])
        if own["numpy"] is not None:
            _set_numpy_state(own["numpy"])
        if own["loader"] is not None and hasattr(self.training_dataloader, "load_state_dict"):
            self.training_dataloader.load_state_dict(own["loader"])

    def _report(self, path: str, missing: list[str], unexpected: list[str], states: list[str]) -> None:
        if self.global_rank != 0:
            return
        for what, names in (
            ("it has no", missing),
            ("the model has no", unexpected),
            ("started anew: it has no", states),
        ):
            if names:
                _log.warning("%s: %s %s", path, what, ", ".join(names))


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a state dict holds, under all their names."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _extra_states(module: torch.nn.Module) -> dict[str, Any]:
    plain = torch.nn.Module.get_extra_state
    return {
        name: part.get_extra_state()
        for name, part in module.named_modules()
        if getattr(type(part), "get_extra_state", plain) is not plain
    }


def _load_extra_states(module: torch.nn.Module, states: Mapping[str, Any]) -> None:
    for name, part in module.named_modules():
        if name in states:
            part.set_extra_state(states[name])


def _load_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Writes the values into the groups' own dicts, and into tensors that are there."""
    if len(groups) != len(saved):
        raise ConfigError(f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}")
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _numpy_state() -> Any:
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    return kind, keys.tolist(), position, has_gauss, gauss


def _set_numpy_state(state: Any) -> None:
    import numpy

    kind, keys, position, has_gauss, gauss = state
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))


def _safe_types() -> list[Any]:
    safe: list[Any] = list(_SAFE)
    if (numpy := sys.modules.get("numpy")) is not None:
        scalar = getattr(numpy, "_core", getattr(numpy, "core", None)).multiarray
        safe += [numpy.ndarray, numpy.dtype, scalar.scalar, scalar._reconstruct]
        safe += [type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefdFD"]
    return safe


def _pack(values: Mapping[str, Any]) -> torch.Tensor:
    """Pickles, and sees to it that it can be read again without running anybody's code."""
    stream = io.BytesIO()
    try:
        torch.save(dict(values), stream)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"client_state, or another state to be saved, can't be pickled: {error}") from None
    packed = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    _unpack(packed)
    return packed


def _unpack(packed: torch.Tensor) -> dict[str, Any]:
    with torch.serialization.safe_globals(_safe_types()):
        try:
            return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error)).strip()
            raise UsageError(
                "client_state, or another state of the checkpoint, holds an object that can't be loaded without running "
                f"code of its own ({reason}); save plain values and tensors, or call "
                "torch.serialization.add_safe_globals([TheClass]) where you save and load"
            ) from None
