"""fp32 weights from a checkpoint, by the names that DeepSpeed's users call: `deepspeed.utils.zero_to_fp32`.

As a program: `python -m pannier.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`. Checkpoints of DeepSpeed's own are read too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from pannier import core
from pannier.checkpoints import state_dict_of
from pannier.deepspeed_import import import_checkpoint


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The model's state dict in fp32 on the CPU; tied parameters are one tensor under all their names."""
    state = _state_dict(pathlib.Path(checkpoint_dir), tag)
    kept = _trained(checkpoint_dir, tag) if exclude_frozen_parameters else state.keys()
    widened: dict[int, torch.Tensor] = {}
    return {
        name: widened.setdefault(id(tensor), tensor.float() if tensor.is_floating_point() else tensor)
        for name, tensor in state.items()
        if name in kept
    }


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 weights into `output_dir`: `pytorch_model.bin`, or safetensors in Hugging Face's layout."""
    folder = pathlib.Path(checkpoint_dir)
    if safe_serialization and not exclude_frozen_parameters:
        with tempfile.TemporaryDirectory() as temporary:
            if _is_deepspeeds(folder, tag):
                import_checkpoint(folder, temporary, _text(tag) or None)
                folder, tag = pathlib.Path(temporary), None
            with _whole_files(output_dir) as output:
                core.consolidate(os.fspath(folder), _text(tag), output, "fp32", max_shard_size)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    if not safe_serialization:
        with _whole_files(output_dir) as output:
            torch.save(state, os.path.join(output, "pytorch_model.bin"))
        return
    once = {id(tensor): name for name, tensor in reversed(list(state.items()))}  # Tied ones by their first name.
    kept = {name: state[name] for name in once.values()}
    with tempfile.TemporaryDirectory() as temporary:
        builder = core.new_checkpoint(
            temporary,
            "fp32",
            [f"model.{name}" for name in kept],
            [tensor.dtype for tensor in kept.values()],
            [list(tensor.shape) for tensor in kept.values()],
        )
        for tensor in kept.values():
            core.call(builder.write, tensor)
        core.call(builder.commit, 0, {})
        with _whole_files(output_dir) as output:
            core.consolidate(temporary, "", output, "fp32", max_shard_size)


@contextlib.contextmanager
def _whole_files(folder: str | os.PathLike[str]) -> Iterator[str]:
    """A folder whose files go into `folder` when they are complete: scripts convert on every rank, and one that has
    written reads while others write."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        yield temporary
        made = sorted(os.listdir(temporary), key=lambda name: (name.endswith(".json"), name))  # An index names the others.
        for name in made:
            os.replace(os.path.join(temporary, name), os.path.join(folder, name))
    if any(name.endswith(".safetensors") for name in made):
        for name in {"model.safetensors", "model.safetensors.index.json"}.difference(made):
            pathlib.Path(folder, name).unlink(missing_ok=True)  # Of an earlier conversion into more or fewer files.


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: Any = None
) -> torch.nn.Module:
    """Loads the fp32 weights into `model`, which comes to the CPU for it."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _text(tag: Any) -> str:
    return "" if tag is None else str(tag)


def _is_deepspeeds(folder: pathlib.Path, tag: Any) -> bool:
    name = _text(tag) or (folder / "latest").read_text().strip()
    return not (folder / name / "manifest.json").exists() and any((folder / name).glob("*_model_states.pt"))


def _state_dict(folder: pathlib.Path, tag: Any) -> dict[str, torch.Tensor]:
    if not _is_deepspeeds(folder, tag):
        return state_dict_of(folder, tag)
    with tempfile.TemporaryDirectory() as temporary:
        import_checkpoint(folder, temporary, None if tag is None else str(tag))
        return state_dict_of(temporary)


def _trained(folder: str | os.PathLike[str], tag: Any) -> set[str]:
    """The names that have states, and the buffers."""
    if _is_deepspeeds(pathlib.Path(folder), tag):
        with tempfile.TemporaryDirectory() as temporary:
            import_checkpoint(folder, temporary, _text(tag) or None)
            return _trained(temporary, None)
    file = core.open_checkpoint(os.fspath(folder), _text(tag))
    names, attributes = core.call(file.names), core.call(file.attributes)
    trained = {name.split(".", 2)[2] for name in names if name.startswith("optimizer.")}
    trained |= {key.removeprefix("kind.") for key in attributes if key.startswith("kind.")}
    return trained | {key.removeprefix("alias.") for key, first in attributes.items() if first in trained}


def main() -> int:
    """The command, with DeepSpeed's flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true")
    parser.add_argument("-t", "--tag")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    given = parser.parse_args()
    convert_zero_checkpoint_to_fp32_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        given.max_shard_size,
        given.safe_serialization,
        given.tag,
        given.exclude_frozen_parameters,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
