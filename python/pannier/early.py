"""Parameters that are partitioned while no engine has them: while their model is being built (`zero.Init`), so that no rank
ever holds it whole, and after their engine has ended.

Each rank keeps a flat share of a parameter's values, all of one size; the parameter keeps its shape and refuses to be
read. `initialize` gives the shares to the core, which makes each parameter whole just long enough to place it. What an
engine leaves is cut in its own way, into pieces, until a parameter has been whole once.
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

MESSAGE_AFTER = (
    "a parameter was read whose engine has ended while it was partitioned (zero_optimization.stage 3): read and change it "
    "inside `with pannier.zero.GatheredParameters(param)`, which all ranks enter, or initialize() again"
)
MESSAGE_LOST = (
    "a parameter was read whose engine has ended, and its values with it, since they rested on a disk: take what you need, "
    "by state_dict() or save_checkpoint(), before destroy()"
)

# Process-wide by nature, like the table of managed parameters: this rank's share of each.
_shares: WeakIdKeyDictionary = WeakIdKeyDictionary()
_pieces: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Of those that an engine left: first element and values.
_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Those that are whole for now, with how often they were asked for.


def is_partitioned(param: torch.Tensor) -> bool:
    """Whether `param` was partitioned before an engine took it, be it whole for now or not."""
    return param in _shares or param in _pieces


def is_away(param: torch.Tensor) -> bool:
    """Whether reading `param` would raise."""
    return is_partitioned(param) and param not in _whole


def partition(params: Iterable[torch.Tensor]) -> None:
    """Leaves each rank its share of rank 0's values. All ranks call it. Those that can't be are left whole."""
    if comm.get_world_size() == 1:
        return
    for param in params:
        if is_partitioned(param) or managed.owner_of(param) is not None or not _can_be(param):
            continue
        flat = _flat(param).clone()
        dist.broadcast(flat, 0)
        _keep(param, flat)


def gather(params: Sequence[torch.Tensor]) -> None:
    """Makes these whole until `let_go`. All ranks call it; calls nest."""
    for param in params:
        if param not in _whole:
            param.data = (_joined(param) if param in _pieces else _gathered(param)).as_strided(param.size(), param.stride())
        _whole[param] = _whole.get(param, 0) + 1


def let_go(params: Sequence[torch.Tensor], modifier_rank: int | None) -> None:
    """Ends `gather`: each rank keeps its share of its own values, or of `modifier_rank`'s."""
    for param in params:
        _whole[param] -= 1
        if _whole[param] > 0:
            continue
        del _whole[param]
        flat = _flat(param)
        if modifier_rank is not None and comm.get_world_size() > 1:
            dist.broadcast(flat, modifier_rank)
        if comm.get_world_size() == 1:
            _pieces[param][1].copy_(flat)
            core.call(torch.ops.pannier.take_memory, param, MESSAGE_AFTER)
            continue
        _pieces.pop(param, None)
        _keep(param, flat)


def take_over(left: Iterable[tuple[torch.Tensor, int, torch.Tensor]], world_size: int) -> None:
    """What an engine leaves: parameters, and where this rank's piece of each begins, and its values. Not a collective."""
    for param, begin, values in left:
        if world_size == 1 and values.device == param.device:
            param.data = values.as_strided(param.size(), param.stride())
        else:
            _pieces[param] = (begin, values)
            core.call(torch.ops.pannier.take_memory, param, MESSAGE_AFTER)


def say_lost(params: Iterable[torch.Tensor]) -> None:
    """Has these say that an engine left nothing of them."""
    for param in params:
        core.call(torch.ops.pannier.take_memory, param, MESSAGE_LOST)


def _gathered(param: torch.Tensor) -> torch.Tensor:
    share = _shares[param]
    flat = share.new_empty(share.numel() * comm.get_world_size())
    dist.all_gather_into_tensor(flat, share)
    return flat[: param.numel()]


def _joined(param: torch.Tensor) -> torch.Tensor:
    begin, values = _pieces[param]
    flat = torch.zeros(param.numel(), dtype=param.dtype, device=param.device)
    flat[begin : begin + values.numel()].copy_(values)
    if comm.get_world_size() > 1:
        # Where ranks have the same piece, and where they have none, the greatest byte is the right one.
        dist.all_reduce(flat.view(torch.uint8), dist.ReduceOp.MAX)
    return flat


def shares_of(params: Sequence[torch.Tensor], taken: Iterable[int]) -> list[torch.Tensor]:
    """What the core is given: the share of each parameter; an empty tensor for one that is whole.

    Only those in `taken` are placed by the core; others are made whole here for good.
    """
    chosen = set(taken)
    shares = []
    for index, param in enumerate(params):
        if is_partitioned(param) and (index not in chosen or comm.get_world_size() == 1):
            gather([param])
            _forget(param)
        elif param in _pieces and param not in _whole:
            gather([param])
            let_go([param], None)
        shares.append(_shares.get(param, torch.empty(0)))
    return shares


def forget(params: Iterable[torch.Tensor]) -> None:
    """The core has placed these."""
    for param in params:
        _forget(param)


def _forget(param: torch.Tensor) -> None:
    _shares.pop(param, None)
    _pieces.pop(param, None)
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
