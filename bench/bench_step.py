"""A whole step: the engine without offload beside a plain torch loop (fused AdamW, clip_grad_norm_), fp32."""

from __future__ import annotations

import ctypes
import statistics

import torch

from pairs import alternate, ratio, report

ROUNDS = 25


def keep_memory() -> None:
    """Has the C library keep freed memory, for all contestants alike; else a step's time depends on whose pages came back."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_threshold, 2**25)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(torch.nn.Embedding(8000, 512), torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.nn.Linear(512, 8000))


def main(_arguments: list[str]) -> int:
    import pannier  # noqa: PLC0415

    keep_memory()

    tokens = torch.randint(0, 8000, (4, 64))
    labels = torch.randint(0, 8000, (4, 64))

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    engine, _, _, _ = pannier.initialize(model=make_model(), config=config)
    offloaded, _, _, _ = pannier.initialize(
        model=make_model(), config={**config, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    )

    def plain_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(plain).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()

    def engine_step(which: object) -> None:
        which.backward(loss_of(which))
        which.step()

    # Later steps amplify rounding (Adam moves a weight by lr however small its gradient is), so the check is of the first.
    contestants = {"torch": plain_step, "ours": lambda: engine_step(engine), "offloaded": lambda: engine_step(offloaded)}
    for step in contestants.values():
        step()
    worst = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), engine.module.parameters(), strict=True))
    seconds = alternate(contestants, ROUNDS)
    same = all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), offloaded.module.parameters(), strict=True))
    report(bench="step", check="weights", worst_difference_to_torch_after_a_step=worst, offload_bit_identical_after_all=same)
    if worst > 2e-6 or not same:
        print("the weights differ; no speed is reported")
        return 1
    for name in ("ours", "offloaded"):
        middle, least, most = ratio(seconds, name, "torch")
        report(bench="step", contestant=name, seconds=round(statistics.median(seconds[name]), 4), of_plain_torch=round(middle, 4), spread=[round(least, 3), round(most, 3)])
    return 0
