"""Parameters that are partitioned while their model is being built (`zero.Init`), so that no rank ever holds it whole.

Each rank keeps a flat share of a parameter's values, all of one size; the parameter keeps its shape and refuses to be
read. `initialize` gives the shares to the core, which makes each parameter whole just long enough to place it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from pannier import comm, core, managed

MESSAGE = (
    "a parameter was read that pannier.zero.Init has partitioned: read and change it inside `with "
    "pannier.zero.GatheredParameters(param)` until initialize() has taken the model"
)

# Process-wide by nature, like the table of managed parameters: this rank's share of each.
_shares: WeakIdKeyDictionary = WeakIdKeyDictionary()
_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Those that are whole for now, with how often they were asked for.


def is_partitioned(param: torch.Tensor) -> bool:
    """Whether `param` was partitioned before an engine took it, be it whole for now or not."""
    return param in _shares


def is_away(param: torch.Tensor) -> bool:
    """Whether reading `param` would raise."""
    return param in _shares and param not in _whole


def partition(params: Iterable[torch.Tensor]) -> None:
    """Leaves each rank its share of rank 0's values. All ranks call it. Those that can't be are left whole."""
    if comm.get_world_size() == 1:
        return
    for param in params:
        if param in _shares or managed.owner_of(param) is not None or not _can_be(param):
            continue
        flat = _flat(param).clone()
        dist.broadcast(flat, 0)
        _keep(param, flat)


def gather(params: Sequence[torch.Tensor]) -> None:
    """Makes these whole until `let_go`. All ranks call it; calls nest."""
    for param in params:
        if param not in _whole:
            share = _shares[param]
            flat = share.new_empty(share.numel() * comm.get_world_size())
            dist.all_gather_into_tensor(flat, share)
            param.data = flat[: param.numel()].as_strided(param.size(), param.stride())
        _whole[param] = _whole.get(param, 0) + 1


def let_go(params: Sequence[torch.Tensor], modifier_rank: int | None) -> None:
    """Ends `gather`: each rank keeps its share of its own values, or of `modifier_rank`'s."""
    for param in params:
        _whole[param] -= 1
        if _whole[param] > 0:
            continue
        del _whole[param]
        flat = _flat(param)
        if modifier_rank is not None:
            dist.broadcast(flat, modifier_rank)
        _keep(param, flat)


def shares_of(params: Sequence[torch.Tensor], taken: Iterable[int]) -> list[torch.Tensor]:
    """What the core is given: the share of each parameter; an empty tensor for one that is whole.

    Only those in `taken` are placed by the core; others are made whole here for good.
    """
    chosen = set(taken)
    shares = []
    for index, param in enumerate(params):
        if param in _shares and index not in chosen:
            gather([param])
            _forget(param)
        shares.append(_shares.get(param, torch.empty(0)))
    return shares


def forget(params: Iterable[torch.Tensor]) -> None:
    """The core has placed these."""
    for param in params:
        _forget(param)


def _forget(param: torch.Tensor) -> None:
    _shares.pop(param, None)
    _whole.pop(param, None)


def _can_be(param: torch.Tensor) -> bool:
    return param.layout == torch.strided and param.device.type in ("cpu", "cuda") and param.numel() > 0 and _is_dense(param)


def _is_dense(param: torch.Tensor) -> bool:
    return torch.ops.aten.is_non_overlapping_and_dense(param)


def _flat(param: torch.Tensor) -> torch.Tensor:
    # All elements in the order in which they lie in memory.
    return param.detach().as_strided((param.numel(),), (1,))


def _keep(param: torch.Tensor, flat: torch.Tensor) -> None:
    size = -(-flat.numel() // comm.get_world_size())
    mine = flat[comm.get_rank() * size :][:size]
    share = flat.new_zeros(size)
    share[: mine.numel()].copy_(mine)
    _shares[param] = share
    core.call(torch.ops.pannier.take_memory, param, MESSAGE)
