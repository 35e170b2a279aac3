"""Reading and writing one rank's part of what the engine keeps for a parameter at stage 3: DeepSpeed's `safe_*_local_*`.

A rank's part is that of an even cut of the flat parameter, padded with zeros at its end, as DeepSpeed has it; how Pannier
cuts shards is its own affair. All ranks call each of these together.
"""

from __future__ import annotations

import torch

from pannier import arguments, comm, fragments, managed
from pannier.errors import UsageError


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the fp32 master weight."""
    return _own_part(param, fragments.safe_get_full_fp32_param(_checked(param)))


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the averaged, unscaled gradient of the pending window."""
    return _own_part(param, fragments.safe_get_full_grad(_checked(param)))


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of an optimizer state."""
    return _own_part(param, fragments.safe_get_full_optimizer_state(_checked(param), optim_state_key))


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's part of the master weight."""
    fragments.safe_set_full_fp32_param(param, _whole(_checked(param), value))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's part of the gradient."""
    fragments.safe_set_full_grad(param, _whole(_checked(param), value))


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Writes this rank's part of an optimizer state."""
    fragments.safe_set_full_optimizer_state(param, _whole(_checked(param), value), optim_state_key)


def _checked(param: torch.Tensor) -> torch.Tensor:
    owner = managed.owner_of(param)
    if owner is None or owner[0].zero_optimization_stage() != 3:
        raise UsageError("a parameter has a part on each rank at stage 3 only; use safe_get_full_* and safe_set_full_*")
    return param


def _part_numel(param: torch.Tensor) -> int:
    return -(-param.numel() // comm.get_world_size())


def _own_part(param: torch.Tensor, full: torch.Tensor | None) -> torch.Tensor | None:
    if full is None:
        return None
    numel = _part_numel(param)
    part = full.new_zeros(numel)
    mine = full.flatten()[comm.get_rank() * numel :][:numel]
    part[: mine.numel()] = mine
    return part


def _whole(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    arguments.require_tensor("value", value)
    mine = value.detach().float().flatten().contiguous()
    if mine.numel() != _part_numel(param):
        raise UsageError(f"this rank's part of the parameter has {_part_numel(param)} elements, the value {mine.numel()}")
    parts = [torch.empty_like(mine) for _ in range(comm.get_world_size())]
    if len(parts) == 1:
        parts = [mine]
    else:
        comm.all_gather(parts, mine)
    return torch.cat(parts)[: param.numel()].view(param.shape)
