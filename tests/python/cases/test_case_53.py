"""Overlap changes no bit: neither of collectives with backward, nor of the update with the next forward, nor delays."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pannier
import ranks
from case_models import cfg, start

WIDTH, STEPS = 32, 3
CELLS = [(1, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")]
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2}}


class Transformer(nn.Module):
    """Twelve layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(12)
        )
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def curve(rank: int, stage: int, home: str, zero: dict[str, Any], **ours: Any) -> list[Any]:
    """Losses and norms of each step, and the bits of the weights after them."""
    config = cfg(stage=stage, dev=home, opt=OPTIMIZER, zero=zero, bf16={"enabled": True}, pannier=ours)
    engine = start(Transformer(), config)
    rows: list[Any] = []
    for number in range(STEPS):
        draw = torch.Generator().manual_seed(10 * number + rank)
        loss = engine(torch.randint(0, 40, (2, 6), generator=draw))
        engine.backward(loss)
        engine.step()
        rows.append([loss.item(), engine.get_global_grad_norm()])
    masters = [pannier.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    rows.append(hashlib.sha256(b"".join(master.contiguous().numpy().tobytes() for master in masters)).hexdigest())
    engine.destroy()
    return rows


def curves(rank: int, world: int) -> dict[str, list[Any]]:
    found = {}
    small = {"stage3_param_persistence_threshold": 0}
    for (stage, home), overlaps in itertools.product(CELLS, (True, False)):
        # Delays on every thread and queue of the engine's stand for a copy that is slow.
        name = f"{stage} {home} {overlaps}"
        zero = {**small, "overlap_comm": overlaps, "reduce_bucket_size": 1e4}
        found[name] = curve(rank, stage, home, zero, overlap_step=overlaps and home == "cpu", stress_seed=int(overlaps))
    for bucket in (1e6, 1e9):
        found[f"bucket {bucket}"] = curve(rank, 2, "cpu", {**small, "reduce_bucket_size": bucket}, stress_seed=2)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_overlap_delays_and_buckets_change_no_bit(world: int) -> None:
    for ended in ranks.run(__file__, "curves", world):
        rows = list(ended.result.values())
        assert all(row == rows[0] for row in rows), ended.result
        assert all(torch.isfinite(torch.tensor(numbers)).all() for numbers in rows[0][:-1])


if __name__ == "__main__":
    ranks.main({"curves": curves})
