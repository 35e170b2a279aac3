"""The result depends on neither stage, bucket size, flags nor how the batch is cut."""

import torch
from torch import nn

from case_batches import BATCH, OPTIMIZER, batches, equal, mlp, plain
from case_models import cfg, matrix, start

CELLS = [(stage, dev) for stage, dev in matrix() if dev != "nvme"]  # The case names two homes; a disk takes one cell.


def trained(gas: int, stage: int, dev: str, **zero) -> list[torch.Tensor]:
    engine = start(mlp(), cfg(stage=stage, dev=dev, micro=BATCH // gas, gas=gas, opt=OPTIMIZER, zero=zero))
    for x, y in batches():
        for part_x, part_y in zip(x.chunk(gas), y.chunk(gas), strict=True):
            engine.backward(nn.functional.mse_loss(engine(part_x), part_y))
            engine.step()
    result = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    return result


def test_all_cuts_match_plain_torch() -> None:
    want = plain()
    for gas in (1, 2, 4):
        for stage, dev in CELLS:
            got = trained(gas, stage, dev)
            assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_buckets_flags_and_stages_keep_every_bit() -> None:
    first = trained(2, 2, "cpu")
    for stage, dev in CELLS:
        for bucket in (1, 7, 289, 1e9):
            assert equal(first, trained(2, stage, dev, reduce_bucket_size=bucket))
    assert equal(first, trained(2, 3, "nvme", reduce_bucket_size=7))
    for flag in ("contiguous_gradients", "reduce_scatter", "overlap_comm", "round_robin_gradients"):
        for value in (True, False):
            assert equal(first, trained(2, 2, "cpu", **{flag: value})), flag
