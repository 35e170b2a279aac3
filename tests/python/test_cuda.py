"""The engine on a GPU: the CPU engine's bits for the same gradients, on every path and under every disturbance."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

import pannier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

SHAPES = [(300, 200), (200,), (), (0, 4), (4096 * 3 + 17,), (64, 64), (130, 7, 3)]


class Bag(torch.nn.Module):
    """Parameters of many shapes whose gradients are given: the loss is their product with what is passed in."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in SHAPES
        )

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        products = [(w * g.to(w.device, w.dtype)).sum().float() for w, g in zip(self.weights, gradients, strict=True)]
        return torch.stack(products).sum()


def gradients_of(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def config_of(precision: str, optimizer: str, accumulation: int, clip: float, **ours: Any) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if optimizer == "SGD":
        params["momentum"] = 0.9
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 20000},
        "pannier": {key: value for key, value in ours.items() if key != "offload"},
    }
    if ours.get("offload"):
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if precision != "fp32":
        config[precision] = {"enabled": True}
        if precision == "fp16":
            config["fp16"]["loss_scale"] = 4.0
    return config


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(device: str, precision: str, optimizer: str, accumulation: int, clip: float, **ours: Any) -> list[torch.Tensor]:
    model = Bag(torch.float32, device)
    engine, *_ = pannier.initialize(
        model=model, config=config_of(precision, optimizer, accumulation, clip, device=device, **ours)
    )
    for step in range(6 * accumulation):
        gradients = gradients_of(step, DTYPES[precision])
        if step == 2 * accumulation and accumulation == 1:
            gradients[1][7] = float("nan")
        engine.backward(engine(gradients))
        engine.step()
    assert engine.skipped_steps == (1 if accumulation == 1 else 0)
    engine.synchronize()
    result = [w.detach().cpu().clone() for w in model.weights]
    result.append(torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64))
    engine.destroy()
    return result


WAYS = {
    "device": {},
    "host": {"offload": True, "streamed_share": 0.0},
    "streamed": {"offload": True, "streamed_share": 1.0},
    "half": {"offload": True, "streamed_share": 0.5},
    "stress": {"offload": True, "streamed_share": 0.5, "stress_seed": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "Lion"])
@pytest.mark.parametrize("precision", DTYPES)
def test_the_bits_of_the_cpu(precision: str, optimizer: str, way: str) -> None:
    for accumulation, clip in itertools.product((1, 3), (0.0, 1.0)):
        expected = train("cpu", precision, optimizer, accumulation, clip)
        actual = train("cuda", precision, optimizer, accumulation, clip, **WAYS[way])
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(a, b), (accumulation, clip, index, (a.float() - b.float()).abs().max())


def test_engine_leaves_no_device_memory() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    train("cuda", "bf16", "AdamW", 1, 1.0, **WAYS["streamed"])
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_memory_stats_are_the_allocators() -> None:
    model = Bag(torch.float32, "cuda")
    engine, *_ = pannier.initialize(model=model, config=config_of("bf16", "AdamW", 1, 1.0))
    engine.backward(engine(gradients_of(0, torch.bfloat16)))
    engine.step()
    torch.cuda.synchronize()
    assert engine.memory_stats()["device"]["current"] == torch.cuda.memory_allocated()
    engine.destroy()
