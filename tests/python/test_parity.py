"""The wall that holds the roof: every stage, home, dtype, clipping, accumulation and rule against plain torch."""

from __future__ import annotations

import pytest
import torch

import pannier
from reference import DTYPES, OPTIMIZERS, Zoo, cells, config, gradients, plain_run

STEPS = 20
TOLERANCE = 2e-6


def trained(rule: str, dtype: str, stage: int, offload: bool, gas: int, clipping: float, **zero) -> dict:
    """Masters, parameters and states by name after the run; closes the engine."""
    model = Zoo()
    settings = config(
        OPTIMIZERS[rule][0], stage=stage, offload=offload, dtype=dtype, gas=gas, clipping=clipping, zero=zero
    )
    engine, optimizer, _, _ = pannier.initialize(model=model, config=settings)
    for step in range(STEPS):
        for micro in range(gas):
            engine.backward(engine(gradients(step, micro, DTYPES[dtype])))
            assert all(param.grad is None for param in model.parameters())
            engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (STEPS, 0, STEPS * gas)
    result = {"norm": torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)}
    for name, param in model.named_parameters():
        result[f"param.{name}"] = param.detach().clone()
        master = pannier.safe_get_full_fp32_param(param)
        result[f"master.{name}"] = param.detach().float() if master is None else master
    for param, state in optimizer.state.items():
        name = next(name for name, other in model.named_parameters() if other is param)
        result.update({f"{key}.{name}": torch.as_tensor(value) for key, value in state.items()})
    engine.destroy()
    return result


def same_bits(left: dict, right: dict) -> list[str]:
    assert left.keys() == right.keys()
    return [key for key in left if not torch.equal(left[key], right[key])]


@pytest.mark.parametrize("gas", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_every_cell_matches_plain_torch(rule: str, dtype: str, gas: int) -> None:
    for clipping in (0.0, 1.0):
        want = plain_run(rule, DTYPES[dtype], STEPS, gas, clipping)
        first = None
        for stage, offload in cells():
            got = trained(rule, dtype, stage, offload, gas, clipping)
            if first is None:
                first = got
                for name, weight in want.items():
                    error = (got[f"master.{name}"].double() - weight).abs()
                    limit = TOLERANCE * weight.abs().clamp(min=1)
                    assert bool((error <= limit).all()), f"{name}: off by {error.max()} with clipping {clipping}"
            assert same_bits(first, got) == [], f"stage {stage}, offload {offload}, clipping {clipping}"
        for name in want:
            # The 16-bit parameter is its master, rounded.
            param, master = first[f"param.{name}"], first[f"master.{name}"]
            assert torch.allclose(param.float(), master, rtol=2**-8 if dtype == "bf16" else 2**-11, atol=6e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bucket_sizes_and_threads_do_not_change_a_bit(dtype: str) -> None:
    threads = torch.get_num_threads()
    first = trained("AdamW", dtype, 2, True, 2, 1.0)
    try:
        for bucket in (1, 7, 289, 1e9):
            for offload in (False, True):
                got = trained("AdamW", dtype, 2, offload, 2, 1.0, reduce_bucket_size=bucket)
                assert same_bits(first, got) == [], f"bucket {bucket}, offload {offload}"
        for count in (1, 3):
            torch.set_num_threads(count)
            assert same_bits(first, trained("AdamW", dtype, 3, True, 2, 1.0)) == [], f"{count} threads"
    finally:
        torch.set_num_threads(threads)


def test_flush_denormal_does_not_change_a_bit() -> None:
    first = trained("AdamW", "fp32", 2, True, 1, 1.0)
    assert torch.set_flush_denormal(True)
    try:
        got = trained("AdamW", "fp32", 2, False, 1, 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(first, got) == []


def test_flags_that_mean_nothing_here_change_nothing() -> None:
    first = trained("AdamW", "fp32", 2, True, 1, 0.0)
    for flag in ("contiguous_gradients", "reduce_scatter", "overlap_comm", "round_robin_gradients"):
        for value in (True, False):
            assert same_bits(first, trained("AdamW", "fp32", 2, True, 1, 0.0, **{flag: value})) == [], flag
