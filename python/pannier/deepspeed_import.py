"""Makes a checkpoint of one that DeepSpeed wrote: ZeRO stages 1, 2 and 3, and universal ones, with optimizer states.

`python -m pannier.deepspeed_import FOLDER OUT [--tag TAG]`, or `pannier checkpoint import`. DeepSpeed's files are
pickles; they are read by torch's loader that runs no code, with empty stand-ins for DeepSpeed's own classes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pannier import core
from pannier.errors import ConfigError

_log = logging.getLogger("pannier")
_STATE_PREFIX = "optimizer."
# What DeepSpeed puts beside the client state, into the same dict.
_ITS_OWN = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names csr_tensor_module_names skipped_steps global_steps global_samples "
    "dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info".split()
)
_GROUP_VALUES = ("lr", "eps", "weight_decay", "momentum")


class StandIn:
    """Takes the place of an object of DeepSpeed's, whose values nobody needs."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Source:
    """A checkpoint of DeepSpeed's: names and shapes first, then tensors one by one."""

    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}
        """Of the trained parameters, in order."""
        self.untrained: dict[str, torch.Tensor] = {}
        self.buffers: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.states: list[str] = []
        self.step_of: dict[str, int] = {}
        self.groups: list[Mapping[str, Any]] = []
        self.counters: dict[str, int] = {}
        self.schedule: int | None = None
        self.client_state: dict[str, Any] = {}
        self.read: Callable[[str, str], torch.Tensor]
        """The tensor of a parameter's: "fp32_param" or one of `states`."""

    def take_model_states(self, all_states: list[Mapping[str, Any]]) -> None:
        """What all kinds of checkpoints have in their model states, of which stage 3 has one a rank."""
        states = all_states[0]
        self.buffers = set(states.get("buffer_names") or ())
        self.aliases = dict(states.get("shared_params") or {})
        trained = {name for shapes in states["param_shapes"] for name in shapes}
        self.untrained = {
            name: tensor
            for name, tensor in states["module"].items()
            if isinstance(tensor, torch.Tensor) and name not in trained and name not in self.aliases
        }
        for name, shape in (states.get("frozen_param_shapes") or {}).items():
            parts = [state["frozen_param_fragments"][name].flatten() for state in all_states]
            self.untrained[name] = torch.cat(parts)[: math.prod(shape)].reshape(shape)
        names = ("global_steps", "global_samples", "skipped_steps")
        self.counters = {name: int(states.get(name) or 0) for name in names}
        self.client_state = {key: value for key, value in states.items() if key not in _ITS_OWN and _is_plain(value)}
        if lost := sorted(str(key) for key in states.keys() - _ITS_OWN - self.client_state.keys()):
            _log.warning("client_state: %s are not taken over, since they are no plain data", ", ".join(lost))
        scheduler = states.get("lr_scheduler")
        if isinstance(scheduler, Mapping):
            self.schedule = scheduler.get("last_batch_iteration")


def _is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def load(path: pathlib.Path) -> Any:
    """A file of DeepSpeed's, without running code of its own."""
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    if foreign := [name for name in unknown if not name.startswith("deepspeed.")]:
        raise ConfigError(f"{path} holds {', '.join(foreign)}, which can't be loaded without running code of its own")
    with torch.serialization.safe_globals([(type("StandIn", (StandIn,), {}), name) for name in unknown]):
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{path}: {error}") from None


def open_source(folder: pathlib.Path) -> Source:
    """The checkpoint in a tag's folder. Raises ConfigError for what is none, or not complete."""
    if (folder / "zero").is_dir():
        return _universal(folder)
    files = _by_rank(folder, "*zero_pp_rank_*_optim_states.pt")
    if not files:
        raise ConfigError(f"{folder} has no *_optim_states.pt: it is no ZeRO checkpoint of DeepSpeed's")
    shards = [load(file)["optimizer_state_dict"] for file in files]
    stage, world = int(_number(shards[0]["zero_stage"])), _number(shards[0]["partition_count"])
    world = max(world) if isinstance(world, list) else world
    if world != len(files):
        raise ConfigError(f"{folder} was written by {world} ranks, but has optimizer states of {len(files)}")
    models = _by_rank(folder, "*_model_states.pt")
    if not models or (stage == 3 and len(models) != world):
        raise ConfigError(f"{folder}: model states of {len(models)} ranks, {world if stage == 3 else 1} were expected")
    states = [load(file) for file in models]
    return _partitioned(shards, states, world) if stage == 3 else _sliced(shards, states[0])


def _number(value: Any) -> Any:
    # An enumeration of DeepSpeed's comes as a stand-in for its call.
    return value.values[0] if isinstance(value, StandIn) else value


def _by_rank(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    return sorted(folder.glob(pattern), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


def _set_steps(source: Source, steps: list[tuple[str, Any]]) -> None:
    source.step_of = {name: int(step) for name, step in steps if step is not None}


def _flat_states(shard: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    base = shard.get("base_optimizer_state")
    if isinstance(base, Mapping):
        return base["state"]
    if isinstance(base, list):
        return dict(enumerate(base))
    return shard["optimizer_state_dict"]["state"]


def _sliced(shards: list[Mapping[str, Any]], states: Mapping[str, Any]) -> Source:
    """Stages 1 and 2: the parameters of a group one after the other, cut into one slice a rank."""
    source = Source()
    source.take_model_states([states])
    flats = [_flat_states(shard) for shard in shards]
    source.states = [key for key, value in flats[0][0].items() if isinstance(value, torch.Tensor) and value.dim() > 0]
    source.groups = shards[0]["base_optimizer_state"]["param_groups"]
    places: dict[str, tuple[int, int]] = {}
    steps = []
    for group, shapes in enumerate(states["param_shapes"]):
        offset = 0
        for name, shape in shapes.items():
            source.shapes[name] = shape
            places[name] = (group, offset)
            steps.append((name, flats[0][group].get("step", source.groups[group].get("step"))))
            offset += math.prod(shape)
    _set_steps(source, steps)

    def pieces(state: str, group: int) -> list[torch.Tensor]:
        if state == "fp32_param":
            return [shard["single_partition_of_fp32_groups"][group] for shard in shards]
        return [flat[group][state] for flat in flats]

    def read(name: str, state: str) -> torch.Tensor:
        group, begin = places[name]
        end = begin + math.prod(source.shapes[name])
        found, at = [], 0
        for piece in pieces(state, group):
            found.append(piece[max(begin - at, 0) : max(end - at, 0)])
            at += piece.numel()
        return torch.cat(found).float()

    source.read = read
    return source


def _partitioned(shards: list[Mapping[str, Any]], states: list[Mapping[str, Any]], world: int) -> Source:
    """Stage 3: each parameter is cut into equal parts, one a rank, the last one padded."""
    source = Source()
    source.take_model_states(states)
    flats = [_flat_states(shard) for shard in shards]
    source.states = [key for key, value in flats[0][0].items() if isinstance(value, torch.Tensor) and value.dim() > 0]
    source.groups = shards[0]["optimizer_state_dict"]["param_groups"]
    offsets: dict[str, int] = {}
    offset = 0
    for shapes in states[0]["param_shapes"]:
        for name, shape in shapes.items():
            source.shapes[name] = shape
            offsets[name] = offset
            offset += -(-math.prod(shape) // world)
    step = flats[0][0].get("step", source.groups[0].get("step"))
    _set_steps(source, [(name, step) for name in offsets])

    def pieces(rank: int, state: str) -> list[torch.Tensor]:
        if state == "fp32_param":
            return [part.flatten() for part in shards[rank]["fp32_flat_groups"]]
        return [flats[rank][index][state].flatten() for index in sorted(flats[rank])]

    joined: dict[tuple[int, str], torch.Tensor] = {}

    def read(name: str, state: str) -> torch.Tensor:
        numel = math.prod(source.shapes[name])
        part = -(-numel // world)
        found = []
        for rank in range(world):
            if (rank, state) not in joined:
                joined[rank, state] = torch.cat(pieces(rank, state))
            found.append(joined[rank, state][offsets[name] : offsets[name] + part])
        return torch.cat(found)[:numel].float()

    source.read = read
    return source


def _universal(folder: pathlib.Path) -> Source:
    """A folder a parameter, with a file a state."""
    source = Source()
    models = _by_rank(folder, "*_model_states.pt")
    if not models:
        raise ConfigError(f"{folder} has no *_model_states.pt")
    states = [load(model) for model in models]
    source.take_model_states(states)
    folders = {path.name: path for path in sorted((folder / "zero").iterdir()) if (path / "fp32.pt").exists()}
    for shapes in states[0]["param_shapes"]:
        source.shapes.update(shapes)
    if missing := source.shapes.keys() - folders.keys():
        raise ConfigError(f"{folder}/zero has no {', '.join(sorted(missing))}")
    first = next(iter(folders.values()))
    source.states = [path.stem for path in sorted(first.glob("*.pt")) if path.stem not in ("fp32", "step")]

    def values(path: pathlib.Path) -> Any:
        loaded = load(path)
        return loaded["param"] if isinstance(loaded, Mapping) else loaded

    steps = []
    for name, path in folders.items():
        if (path / "step.pt").exists():
            steps.append((name, values(path / "step.pt")))
    _set_steps(source, steps)
    source.read = lambda name, state: values(
        folders[name] / ("fp32.pt" if state == "fp32_param" else f"{state}.pt")
    ).flatten()[: math.prod(source.shapes[name])].float()
    return source


def attributes_of(source: Source) -> dict[str, str]:
    """What the core keeps as text beside the tensors."""
    attributes = {f"counters.{key}": str(value) for key, value in source.counters.items()}
    attributes |= {f"alias.{other}": first for other, first in source.aliases.items()}
    attributes |= {f"kind.{name}": "buffer" for name in source.buffers}
    most = max(source.step_of.values(), default=source.counters["global_steps"])
    attributes["optimizer.step"] = str(most)
    attributes["optimizer.states"] = ",".join(source.states)
    attributes |= {f"optimizer.step.{name}": str(step) for name, step in source.step_of.items() if step != most}
    attributes["groups"] = str(len(source.groups))
    for index, group in enumerate(source.groups):
        values = {key: group[key] for key in _GROUP_VALUES if isinstance(group.get(key), (int, float))}
        if "betas" in group:
            values["beta1"], values["beta2"] = group["betas"]
        attributes |= {f"group.{index}.{key}": repr(float(value)) for key, value in values.items()}
    if source.schedule is not None:
        attributes["schedule.iteration"] = str(source.schedule)
    if source.client_state:
        attributes["client_state"] = json.dumps(source.client_state)
    attributes["imported_from"] = "DeepSpeed"
    return attributes


def tensors_of(source: Source) -> Iterator[tuple[str, torch.dtype, torch.Size, Callable[[], torch.Tensor]]]:
    """Name, type, shape and reader of every tensor of the checkpoint to be made."""
    for name, shape in source.shapes.items():
        yield f"model.{name}", torch.float32, shape, lambda name=name: source.read(name, "fp32_param")
        for state in source.states:
            yield (
                f"{_STATE_PREFIX}{state}.{name}",
                torch.float32,
                shape,
                lambda name=name, state=state: source.read(name, state),
            )
    for name, tensor in source.untrained.items():
        yield f"model.{name}", tensor.dtype, tensor.shape, lambda tensor=tensor: tensor


def import_checkpoint(folder: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None) -> str:
    """Makes `out`/TAG of DeepSpeed's checkpoint `folder`/TAG, and returns its path. `tag`: default, the latest."""
    parent = pathlib.Path(folder)
    if tag is None:
        latest = parent / "latest"
        if not latest.exists():
            raise ConfigError(f"{parent} has no file 'latest'; say which checkpoint")
        tag = latest.read_text().strip()
    if not (parent / tag).is_dir():
        raise ConfigError(f"{parent} has no checkpoint '{tag}'")
    source = open_source(parent / tag)
    tensors = list(tensors_of(source))
    builder = core.new_checkpoint(
        os.fspath(out),
        tag,
        [name for name, *_ in tensors],
        [dtype for _, dtype, *_ in tensors],
        [list(shape) for _, _, shape, _ in tensors],
    )
    for _, _, shape, read in tensors:
        core.call(builder.write, read().reshape(shape))
    core.call(builder.commit, source.counters["global_steps"], attributes_of(source))
    return str(pathlib.Path(out) / tag)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="pannier checkpoint import", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="DeepSpeed's folder, which holds `latest` and the tags")
    parser.add_argument("out", help="the folder to save into")
    parser.add_argument("--tag", help="the checkpoint; default: the latest")
    given = parser.parse_args()
    try:
        print(import_checkpoint(given.folder, given.out, given.tag))
    except (ValueError, OSError) as error:
        print(f"pannier: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
