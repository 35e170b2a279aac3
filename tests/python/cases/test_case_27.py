"""The result depends on neither stage, bucket size, flags nor how the batch is cut."""

import torch
from torch import nn

from case_models import cfg, matrix, start

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
STEPS, BATCH = 10, 8


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 17))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(BATCH, 17, generator=draw), torch.randn(BATCH, 17, generator=draw)) for _ in range(STEPS)]


def plain() -> list[torch.Tensor]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def trained(gas: int, stage: int, dev: str, **zero) -> list[torch.Tensor]:
    engine = start(mlp(), cfg(stage=stage, dev=dev, micro=BATCH // gas, gas=gas, opt=OPTIMIZER, zero=zero))
    for x, y in batches():
        for part_x, part_y in zip(x.chunk(gas), y.chunk(gas), strict=True):
            engine.backward(nn.functional.mse_loss(engine(part_x), part_y))
            engine.step()
    result = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    return result


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_all_cuts_match_plain_torch() -> None:
    want = plain()
    for gas in (1, 2, 4):
        for stage, dev in matrix():
            got = trained(gas, stage, dev)
            assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_buckets_flags_and_stages_keep_every_bit() -> None:
    first = trained(2, 2, "cpu")
    for stage, dev in matrix():
        for bucket in (1, 7, 289, 1e9):
            assert equal(first, trained(2, stage, dev, reduce_bucket_size=bucket))
    for flag in ("contiguous_gradients", "reduce_scatter", "overlap_comm", "round_robin_gradients"):
        for value in (True, False):
            assert equal(first, trained(2, 2, "cpu", **{flag: value})), flag
