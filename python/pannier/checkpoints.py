"""Saving and loading: what Python adds to the core's checkpoint, and what it takes back.

The core writes tensors, step counts, loss scale and torch's random numbers. From here come the names of what is not
trained, and bytes: the caller's client state, the values of the parameter groups, the schedule, the loader's position.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pannier import core, managed
from pannier.errors import ConfigError, UsageError
from pannier.group_values import hyperparameters
from pannier.lr_schedules import BY_NAME, LrSchedule
from pannier.packed_states import pack, unpack

if TYPE_CHECKING:
    from pannier.config import Config
    from pannier.group_values import Fixed
    from pannier.optimizer import Optimizer

_log = logging.getLogger("pannier")
_COMMON, _OWN = "common", "own"


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
    follows_deepspeed = False
    """Whether files get DeepSpeed's names where nobody gives them others: a script that says `import deepspeed` made it."""

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

        With `"checkpoint": {"async": true}` it is written while training goes on: see `finish_checkpoint`.
        `tag` is `global_step` and the number of steps where it is not given. `client_state` comes back from
        `load_checkpoint`. What was saved before stays whole whatever happens.
        """
        if save_dir is None or not os.fspath(save_dir):
            raise UsageError(f"save_checkpoint() needs a folder to save into, got {save_dir!r}")
        try:
            frozen, buffers = self._untrained()
            groups = [] if self.optimizer is None else hyperparameters(self.optimizer.param_groups, self.fixed_values)
            contents = {_COMMON: pack(self._common(client_state)), _OWN: pack(self._own())}
        except Exception as error:
            with contextlib.suppress(ConfigError):  # The others are told; here the error itself says more.
                what = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
                core.call(self.core.refuse_checkpoint, f"{what}{error}")
            raise
        try:
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
                {"schedule.kind": type(self.lr_scheduler).__name__} if hasattr(self.lr_scheduler, "state_dict") else {},
                contents,
            )
        except ConfigError as error:
            raise UsageError(str(error)) from None
        if self.follows_deepspeed and self.global_rank == 0:
            _leave_recovery_script(pathlib.Path(save_dir))
        return True

    def finish_checkpoint(self) -> None:
        """Waits until the last checkpoint is on disk, with `"checkpoint": {"async": true}`; every rank calls it.

        The next save, load and `destroy` do so too. An error of the writing is raised by the next call of any kind.
        """
        core.call(self.core.finish_checkpoint)

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
        if load_dir is None or not os.fspath(load_dir):
            raise UsageError(f"load_checkpoint() needs a folder to load from, got {load_dir!r}")
        frozen, buffers = self._untrained()
        by_caller = custom_load_fn is not None
        if custom_load_fn is not None:
            if not self._load_by(custom_load_fn, load_dir, tag):
                return None, {}
            # What he has not touched is as it was; the masters of the rest come with the optimizer's states.
            frozen, buffers, load_module_strict = {}, {}, False
        path, attributes, common, own, reports = core.call(
            self.core.load_checkpoint,
            os.fspath(load_dir),
            "" if tag is None else str(tag),
            load_module_strict,
            load_optimizer_states,
            load_module_only,
            not by_caller or (load_optimizer_states and not load_module_only),
            0 if self.optimizer is None else len(self.optimizer.param_groups),
            self._schedules() if load_lr_scheduler_states and not load_module_only else [],
            list(frozen),
            list(frozen.values()),
            list(buffers),
            list(buffers.values()),
        )
        if not path:
            _say_nothing_was_loaded(load_dir)
            return None, {}
        if not by_caller:
            self._report(path, *reports)
        saved = unpack(common[_COMMON]) if _COMMON in common else {}
        _load_extra_states(self.module, saved.get("extra_states", {}))
        client_state = saved.get("client_state", json.loads(attributes.get("client_state", "{}")))
        if load_module_only:
            return path, client_state
        if load_lr_scheduler_states and saved:
            self._load_schedule(path, saved.get("lr_scheduler"))
        if load_optimizer_states and self.optimizer is not None and "param_groups" in saved:
            changed = _load_groups(self.optimizer.param_groups, saved["param_groups"], self.lr_scheduler is not None)
            if changed and self.global_rank == 0:
                _log.warning(
                    "load_checkpoint: the checkpoint's values come before the configuration's: %s; "
                    "write into optimizer.param_groups after loading to change them",
                    ", ".join(changed),
                )
        if not saved:
            self._load_from_text(attributes, load_lr_scheduler_states, load_optimizer_states)
        if _OWN in own:
            self._load_own(unpack(own[_OWN]))
        return path, client_state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        max_shard_size: str = "5GB",
    ) -> bool:
        """Writes the model as it is, in its own type, as a Hugging Face folder; every rank calls it.

        A `save_filename` that does not end in `.safetensors` is written by `torch.save`. Where it is not given, it is
        `model.safetensors`; `pytorch_model.bin` in a script that says `import deepspeed`.
        """
        if save_filename is None:
            save_filename = "pytorch_model.bin" if self.follows_deepspeed else "model.safetensors"
        frozen, buffers = self._untrained()
        untrained = {**({} if exclude_frozen_parameters else frozen), **buffers}
        if not save_filename.endswith(".safetensors"):
            state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
            if self.global_rank == 0:
                os.makedirs(save_dir, exist_ok=True)
                torch.save(state, os.path.join(save_dir, save_filename))
            return True
        core.call(
            self.core.export_model,
            os.fspath(save_dir),
            save_filename,
            core.parse_size(max_shard_size),
            list(untrained),
            list(untrained.values()),
        )
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own state dict."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Sequence[torch.Tensor] | None = None,
        allowed_missing_keys: Collection[str] | None = None,
    ) -> None:
        """Loads the state dict under checkpoint["module"] into the module; every rank calls it.

        `allowed_missing_keys`: names that it need not have although `strict`. Partitioned parameters are gathered as they
        are loaded; for a `custom_load_fn`, which is on its own, those of `z3_params_to_fetch`, or all with `fetch_z3_params`.
        """
        self.core  # noqa: B018
        self.wait_for_parameters()
        state = checkpoint["module"]
        if custom_load_fn is None:
            allowed = frozenset(allowed_missing_keys or ()) if strict else None
            result = self.module.load_state_dict(state, strict=strict and not allowed)
            missing = [name for name in result.missing_keys if allowed is not None and name not in allowed]
            if allowed and (missing or result.unexpected_keys):
                raise ConfigError(
                    f"the state dict is of another model: it has no {missing}, this model has no {result.unexpected_keys}"
                )
        else:
            every = range(len(self._params)) if fetch_z3_params else ()
            fetched = {id(param) for param in z3_params_to_fetch or ()}
            held = [*every] or [index for index, param in enumerate(self._params) if id(param) in fetched]
            self.hold_parameters(held)
            try:
                custom_load_fn(src=state, dst=self.module)
            finally:
                self.let_go_parameters(held)
        self.parameters_changed()

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """The module's state dict on rank 0's CPU, in its own type, a parameter at a time; every rank calls it."""
        first: dict[int, torch.Tensor | None] = {}  # On all ranks, since all hold a tied parameter once.
        state: dict[str, Any] = {}
        frozen = self._untrained()[0] if exclude_frozen_parameters else {}
        tensors = [*self.module.named_parameters(remove_duplicate=False), *_persistent_buffers(self.module)]
        index_of = {id(param): index for index, param in enumerate(self._params)}
        for full_name, tensor in tensors:
            name = managed.plain_name(full_name)
            if name in frozen:
                continue
            if id(tensor) not in first:
                held = [index_of[id(tensor)]] if id(tensor) in index_of else []
                self.hold_parameters(held)
                first[id(tensor)] = tensor.detach().to("cpu", copy=True) if self.global_rank == 0 else None
                self.let_go_parameters(held)
            if self.global_rank == 0:
                state[name] = first[id(tensor)]
        return state

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _load_by(self, load: Callable[..., None], load_dir: str | os.PathLike[str], tag: Any) -> bool:
        """Has the caller's function load the module from a state dict. False where there is no `latest`."""
        if tag is None and not (pathlib.Path(load_dir) / "latest").exists():
            _say_nothing_was_loaded(load_dir)
            return False
        state = state_dict_of(load_dir, tag)
        everything = range(len(self._params))
        self.hold_parameters(everything)
        try:
            load(src=state, dst=self.module)
        finally:
            self.let_go_parameters(everything)
        self.parameters_changed()
        return True

    def wait_for_parameters(self) -> None:
        """Waits until all parameters are in place."""
        raise NotImplementedError

    def hold_parameters(self, indices: Sequence[int]) -> None:
        """Makes parameters whole."""
        raise NotImplementedError

    def let_go_parameters(self, indices: Sequence[int], modifier_rank: int | None = None) -> None:
        """Ends `hold_parameters`."""
        raise NotImplementedError

    def parameters_changed(self) -> None:
        """Says that parameters were written."""
        raise NotImplementedError

    def _untrained(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Frozen parameters and persistent buffers by name, each once."""
        trained = set() if self.optimizer is None else self.optimizer.state_indices.keys()
        frozen = {
            managed.plain_name(name): param.detach()
            for name, param in self.module.named_parameters()
            if id(param) not in trained
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
        for full_name, tensor in tensors:
            name = managed.plain_name(full_name)
            if first.setdefault(id(tensor), name) != name:
                aliases[name] = first[id(tensor)]
        return aliases

    def _schedules(self) -> list[str]:
        """The kind of the schedule, then the other kinds whose state it takes over."""
        if not hasattr(self.lr_scheduler, "load_state_dict"):
            return []
        own = type(self.lr_scheduler).__name__
        return [own, *(BY_NAME if isinstance(self.lr_scheduler, LrSchedule) else ())]

    def _load_schedule(self, path: str, state: dict[str, Any] | None) -> None:
        if not hasattr(self.lr_scheduler, "load_state_dict"):
            return
        if state is not None:
            self.lr_scheduler.load_state_dict(state)
        elif self.global_rank == 0:
            _log.warning("%s has no state of a schedule: the %s starts anew", path, type(self.lr_scheduler).__name__)

    def _common(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """What is the same on all ranks, or rank 0's."""
        if self.global_rank != 0:
            return {}
        if client_state is not None and not isinstance(client_state, Mapping):
            raise UsageError(f"client_state must be a dict, not a {type(client_state).__name__}")
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

    def _load_from_text(self, attributes: Mapping[str, str], schedule: bool, groups: bool) -> None:
        """From a checkpoint that no Python engine wrote: an imported one, say."""
        iteration = attributes.get("schedule.iteration")
        if schedule and iteration is not None and isinstance(self.lr_scheduler, LrSchedule):
            self.lr_scheduler.load_state_dict({"last_batch_iteration": int(iteration)})
        if groups and self.optimizer is not None and attributes.get("groups", "0") != "0":
            known = self.optimizer.param_groups[0].keys()
            saved = [_group_from_text(attributes, index, known) for index in range(int(attributes["groups"]))]
            _load_groups(self.optimizer.param_groups, saved, self.lr_scheduler is not None)

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


def state_dict_of(folder: str | os.PathLike[str], tag: Any = None) -> dict[str, torch.Tensor]:
    """The model of a checkpoint as a state dict on the CPU; trained parameters are fp32, tied ones one tensor."""
    file = core.open_checkpoint(os.fspath(folder), "" if tag is None else str(tag))
    prefix = "model."
    state = {name.removeprefix(prefix): core.call(file.read, name) for name in core.call(file.names) if name.startswith(prefix)}
    for key, first in core.call(file.attributes).items():
        if key.startswith("alias.") and first in state:
            state[key.removeprefix("alias.")] = state[first]
    return state


def _say_nothing_was_loaded(folder: Any) -> None:
    if (path := pathlib.Path(folder) / "manifest.json").is_file():
        raise UsageError(
            f"{path.parent} is a checkpoint itself: load from the folder that it is in, with tag={path.parent.name!r}"
        )
    tags = sorted(path.parent.name for path in pathlib.Path(folder).glob("*/manifest.json"))
    there = f"give one of the tags that are there: {', '.join(tags)}" if tags else "there is no tag in it"
    _log.warning("%s has no file 'latest', and no tag was given: nothing was loaded; %s", folder, there)


_RECOVERY_SCRIPT = '''"""fp32 weights of a checkpoint in this folder: python zero_to_fp32.py . OUTPUT_FOLDER"""
import sys

from pannier.zero_to_fp32 import *  # noqa: F403
from pannier.zero_to_fp32 import main

if __name__ == "__main__":
    sys.exit(main())
'''


def _leave_recovery_script(folder: pathlib.Path) -> None:
    path = folder / "zero_to_fp32.py"
    try:
        if not path.exists():
            path.write_text(_RECOVERY_SCRIPT)
    except OSError as error:  # The checkpoint is there; this is for convenience.
        _log.warning("%s could not be written: %s", path, error.strerror)


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a state dict holds, under all their names."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield managed.plain_name(f"{prefix}.{name}" if prefix else name), buffer


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


def _load_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]], is_scheduled: bool) -> list[str]:
    """Writes the values into the groups' own dicts, and into tensors that are there. Returns what a user had set
    otherwise."""
    if len(groups) != len(saved):
        raise ConfigError(f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}")
    changed = []
    for index, (group, values) in enumerate(zip(groups, saved, strict=True)):
        # With a schedule lr is the moment's; what was asked for is initial_lr, where there is one.
        asked = "initial_lr" if "initial_lr" in group and "initial_lr" in values else None if is_scheduled else "lr"
        for key in filter(None, (asked, "weight_decay", "eps", "betas")):
            if key in group and key in values and _differ(group[key], values[key]):
                changed.append(f"{key} {values[key]} instead of {group[key]} in parameter group {index}")
        for key, value in values.items():
            if key == "decoupled_weight_decay" and key in group:
                continue  # It chose the update at initialize().
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value
    return changed


def _differ(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)):
        return list(left) != list(right)
    return float(left) != float(right)


def _group_from_text(attributes: Mapping[str, str], index: int, known: Collection[str]) -> dict[str, Any]:
    prefix = f"group.{index}."
    values: dict[str, Any] = {
        key.removeprefix(prefix): float(value) for key, value in attributes.items() if key.startswith(prefix)
    }
    if "beta1" in values:
        values["betas"] = (values.pop("beta1"), values.pop("beta2"))
    return {key: value for key, value in values.items() if key in known}


def _numpy_state() -> Any:
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    return kind, keys.tolist(), position, has_gauss, gauss


def _set_numpy_state(state: Any) -> None:
    import numpy

    kind, keys, position, has_gauss, gauss = state
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
