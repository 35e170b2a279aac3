"""fp32 weights from checkpoints."""

import pathlib
import re

from pannier.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """The files of one of DeepSpeed's checkpoints that hold optimizer states, in the order of the ranks."""
    files = [str(path) for path in pathlib.Path(checkpoint_dir).glob("*_optim_states.pt")]
    if not files:
        raise FileNotFoundError(f"there is no *_optim_states.pt in {checkpoint_dir}")
    return sorted(files, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
