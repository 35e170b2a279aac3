"""Recomputation sees whole weights, frozen ones too, and changes no bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks
import pannier
from case_models import cfg, start

WIDTH = 64
CELLS = [(0, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "param")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x))).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if kind == "plain" else checkpoint(block, x, use_reentrant=kind == "reentrant")
        return x.pow(2).mean()


def train(rank: int, world: int) -> Any:
    results: dict[str, Any] = {}
    for stage, home in CELLS:
        for kind in ("plain", "reentrant", "not reentrant"):
            zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
            if home == "param":
                zero["offload_param"] = {"device": "cpu"}
            model = Stack()
            engine = start(model, cfg(stage=stage, dev="none" if home == "none" else "cpu", gas=2, zero=zero))
            norms, peaks = [], []
            draw = torch.Generator().manual_seed(1)
            for micro in range(6):
                x = torch.randn(2, WIDTH, generator=draw).requires_grad_()
                engine.reset_peak_memory()
                resting = engine.memory_stats()["device"]["by_owner"]["parameters"]["current"]
                engine.backward(engine(x, kind))
                peaks.append(engine.memory_stats()["device"]["by_owner"]["parameters"]["peak"] - resting)
                engine.step()
                if micro % 2:
                    norms.append(engine.get_global_grad_norm())
            masters = [
                pannier.safe_get_full_fp32_param(param) if param.requires_grad else value
                for param, value in zip(model.parameters(), model.state_dict().values(), strict=True)
            ]
            bits = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in masters)).hexdigest()
            results[f"{stage} {home}, {kind}"] = {"bits": bits, "norms": norms, "peak": max(peaks)}
            engine.destroy()
    return results


def test_recomputation_changes_nothing() -> None:
    block = 4 * sum(param.numel() for param in Block().parameters())
    for world in (1, 2):
        for ended in ranks.run(__file__, "train", world):
            for stages in ([0, 1], [2, 3]):  # With accumulation each pair has its own last bits.
                rows = [row for name, row in ended.result.items() if int(name[0]) in stages]
                assert len({row["bits"] for row in rows}) == 1 and len({tuple(row["norms"]) for row in rows}) == 1
            # Of the parameters no more than two blocks are whole at once, frozen ones with them.
            assert all(row["peak"] <= 2 * block for row in ended.result.values()), ended.result


if __name__ == "__main__":
    ranks.main({"train": train})
