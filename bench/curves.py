"""Whether training is what it should be, on real text: bits of every way to update, and loss curves beside plain torch.

    python bench/curves.py [--steps 300] [--bits-steps 50] [--stress-steps 200] [--device cuda|cpu] [--out curves.json]

1. bits: the same training on every path, split, bucket size and budget, and with random delays on every queue and
   thread. Weights and losses must have the same bits. Gradients come from torch, which is told to be deterministic.
2. curves: Pannier beside plain torch with fp32 master weights and torch's fused AdamW. A second plain run, with torch's
   AdamW computed in another order (foreach), shows how far rounding alone moves a curve.

The text is the sources of Python's standard library, byte by byte. Prints JSON lines; status 1 where bits differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Read when CUDA starts.

import torch
from torch import nn
from torch.nn import functional

import pannier

VOCABULARY = 256
CLIP = 1.0
LEARNING_RATE = 3e-4
WINDOW = 20  # Steps whose mean loss is compared: single losses are as noisy as their batches.


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Bytes(nn.Module):
    """A language model of bytes; its forward returns the loss."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1]) + self.places
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


class Work:
    """The model and the batches, the same for everybody."""

    def __init__(self, device: str) -> None:
        large = device == "cuda"
        self.device = torch.device(device)
        self.width, self.layers, self.length, self.batch = (1024, 12, 1024, 8) if large else (64, 2, 64, 4)
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Bytes(self.width, self.layers, self.length).to(self.device, torch.bfloat16)

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            begins = torch.randint(0, self.text.numel() - self.length - 1, (self.batch,), generator=generator)
            rows = [self.text[begin : begin + self.length + 1] for begin in begins.tolist()]
            yield torch.stack(rows).long().to(self.device)


def train_plain(work: Work, steps: int, **adamw: Any) -> dict[str, Any]:
    """Plain torch: bf16 weights, fp32 masters, gradients clipped in fp32."""
    model = work.model()
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.01, **adamw)
    losses = []
    for batch in work.batches(steps):
        loss = model(batch)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        losses.append(loss.detach())
    return result_of(losses, weights)


def train_ours(work: Work, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Pannier; `options`: zero (the section's own keys) and pannier (the same)."""
    config = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2, **options.get("zero", {})},
        "pannier": options.get("pannier", {}),
    }
    model = work.model()
    engine, *_ = pannier.initialize(model=model, config=config)
    losses = []
    for batch in work.batches(steps):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.synchronize()
    with pannier.zero.GatheredParameters(list(model.parameters())):
        result = result_of(losses, list(model.parameters()))
    engine.destroy()
    return result


def result_of(losses: list[torch.Tensor], weights: list[torch.Tensor]) -> dict[str, Any]:
    values = [loss.item() for loss in losses]
    digest = hashlib.sha256(json.dumps(values).encode())
    for weight in weights:
        digest.update(weight.detach().cpu().view(torch.int16).numpy().tobytes())
    return {"losses": values, "digest": digest.hexdigest()[:16]}


_CPU = {"offload_optimizer": {"device": "cpu"}}


def ways() -> dict[str, dict[str, Any]]:
    """Every path, split, bucket size, budget and home."""
    found: dict[str, dict[str, Any]] = {"no offload": {}, "planned": {"zero": _CPU}}
    for share in (0.0, 0.3, 1.0):
        found[f"streamed {share}"] = {"zero": _CPU, "pannier": {"streamed_share": share}}
        found[f"streamed {share}, overlap"] = {
            "zero": _CPU,
            "pannier": {"streamed_share": share, "overlap_step": True},
        }
    for bucket in (10_000, 3_000_000, 1_000_000_000):
        found[f"bucket {bucket}"] = {"zero": {**_CPU, "reduce_bucket_size": bucket}}
    found["budget"] = {"zero": _CPU, "pannier": {"device_memory": "16GiB"}}
    stage3 = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    found["stage 3"] = {"zero": {**_CPU, **stage3}}
    found["stage 3, overlap"] = {"zero": {**_CPU, **stage3}, "pannier": {"overlap_step": True}}
    return found


def stressed() -> dict[str, dict[str, Any]]:
    """Ways with random delays on every queue and thread."""
    chosen = ["planned", "streamed 0.3", "streamed 1.0, overlap", "stage 3", "stage 3, overlap"]
    found = {}
    for seed, name in enumerate(chosen, 1):
        way = ways()[name]
        found[f"{name}, stress {seed}"] = {**way, "pannier": {**way.get("pannier", {}), "stress_seed": seed}}
    return found


def compare_bits(kind: str, steps: int, work: Work, chosen: dict[str, dict[str, Any]], say: Callable[..., None]) -> bool:
    """Whether all of `chosen`, and training without offload, end with the same bits."""
    digests = {}
    for name, options in {"no offload": {}, **chosen}.items():
        start = time.monotonic()
        result = train_ours(work, steps, options)
        digests[name] = result["digest"]
        say(kind=kind, way=name, steps=steps, digest=result["digest"], seconds=round(time.monotonic() - start, 1))
    same = len(set(digests.values())) == 1
    say(kind=kind, same=same, ways=len(digests))
    return same


def compare_curves(steps: int, work: Work, say: Callable[..., None]) -> None:
    plain = train_plain(work, steps, fused=True)["losses"]
    others = {
        "torch, foreach": train_plain(work, steps, foreach=True)["losses"],
        "pannier, no offload": train_ours(work, steps, {})["losses"],
        "pannier, offload": train_ours(work, steps, {"zero": _CPU})["losses"],
    }
    say(kind="curve", who="torch, fused", losses=every_tenth(plain))
    for who, losses in others.items():
        off = [abs(a - b) for a, b in zip(smooth(losses), smooth(plain), strict=True)]
        first = next((step for step, (a, b) in enumerate(zip(losses, plain, strict=True)) if a != b), None)
        say(
            kind="curve",
            who=who,
            losses=every_tenth(losses),
            most_off=round(max(off), 5),
            mean_off=round(sum(off) / len(off), 5),
            first_step_that_differs=first,
        )


def smooth(losses: list[float]) -> list[float]:
    window = min(WINDOW, len(losses))
    return [sum(losses[at : at + window]) / window for at in range(len(losses) - window + 1)]


def every_tenth(losses: list[float]) -> list[float]:
    return [round(loss, 4) for loss in losses[:: max(1, len(losses) // 10)]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of the curves; 0: none")
    parser.add_argument("--bits-steps", type=int, default=50, help="0: none")
    parser.add_argument("--stress-steps", type=int, default=200, help="0: none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=pathlib.Path, help="a file for the same lines")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    work = Work(arguments.device)
    out = arguments.out.open("w", encoding="utf-8") if arguments.out else None

    def say(**values: Any) -> None:
        for file in (sys.stdout, out):
            if file:
                print(json.dumps(values), file=file, flush=True)

    same = True
    if arguments.bits_steps:
        same = compare_bits("bits", arguments.bits_steps, work, ways(), say) and same
    if arguments.stress_steps:
        same = compare_bits("stress", arguments.stress_steps, work, stressed(), say) and same
    if arguments.steps:
        compare_curves(arguments.steps, work, say)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
