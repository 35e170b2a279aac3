"""The cases on several ranks: one process a rank runs every case in every cell, and says what each came to."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pannier
from case_batches import BATCH, OPTIMIZER, batches, equal, mlp, plain
from case_models import OPT1, Dot, Pair, Tied, Turned, cfg, run, start, weight

Cell = tuple[int, str]
CASES: dict[str, Callable[[int, int], None]] = {}
FLAT = {"rtol": 0, "atol": 1e-6}


def case(number: str) -> Callable[[Callable[[int, int], None]], Callable[[int, int], None]]:
    def kept(body: Callable[[int, int], None]) -> Callable[[int, int], None]:
        CASES[number] = body
        return body

    return kept


def cells(first: int = 0) -> Iterator[Cell]:
    """Stages and homes; "param": parameters rest on the host too."""
    for stage in range(first, 4):
        for home in ("none", "cpu", "nvme", "param"):
            if not (stage == 0 and home != "none") and not (stage < 3 and home == "param"):
                yield stage, home


def settings(cell: Cell, **kw: Any) -> dict[str, Any]:
    stage, home = cell
    zero = {"stage3_param_persistence_threshold": 0, **kw.pop("zero", {})}
    if home == "param":
        zero["offload_param"] = {"device": "cpu"}
    return cfg(stage=stage, dev="cpu" if home == "param" else home, zero=zero, **kw)


def close(have: Sequence[float], want: Sequence[float], tolerance: float = 1e-6) -> None:
    assert have == pytest.approx(want, abs=tolerance)


@case("01")
def batch_sizes(rank: int, world: int) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given, want in (
        ((8, 2, None), (8, 2, 2)),
        ((8, None, 2), (8, 2, 2)),
        ((None, 3, 4), (24, 3, 4)),
        ((8, None, None), (8, 4, 1)),
    ):
        sizes = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
        engine = start(Dot(), {**sizes, "optimizer": OPT1, "zero_optimization": {"stage": 2}})
        assert engine.get_batch_info() == want
        engine.destroy()
    with pytest.raises(pannier.ConfigError, match="7"):
        start(Dot(), {"train_batch_size": 7, "optimizer": OPT1, "zero_optimization": {"stage": 2}})


@case("09")
def decay_rule(rank: int, world: int) -> None:
    params = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    adamw = ([0.89, 2.08, 2.8700001, 3.96], [0.6732891, 2.2376080, 2.6138875, 3.8811963])
    adam = ([0.9, 2.1, 2.9, 3.9], [0.7001746, 2.2998719, 2.7000427, 3.7002740])
    for cell in cells():
        for kind, more, want in (("AdamW", {}, adamw), ("Adam", {}, adamw), ("Adam", {"adam_w_mode": False}, adam)):
            optimizer = {"type": kind, "params": {**params, **more}}
            engine = start(Dot((1.0, 2.0, 3.0, 4.0)), settings(cell, opt=optimizer))
            x = [0.5, -1.0, 2.0, 0.0]
            run(engine, [x])
            close(weight(engine), want[0])
            run(engine, [x, x])
            close(weight(engine), want[1])
            engine.destroy()


class Grouped(Pair):
    def __init__(self) -> None:
        super().__init__(1.0, 1.0)
        self.frozen = Dot((5.0,))
        self.frozen.w.requires_grad_(False)

    def forward(self) -> torch.Tensor:
        x = torch.tensor([2.0])
        return self.a(x) + self.b(x) + self.frozen(x)

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [self.a.w], "lr": 0.1, "weight_decay": 0.5},
            {"params": [self.frozen.w], "lr": 7.0},
            {"params": [self.b.w], "lr": 0.2, "weight_decay": 0.0},
        ]


@case("14")
def groups_keep_their_settings(rank: int, world: int) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-8}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    for cell in cells():
        model = Grouped()
        engine = start(model, settings(cell, opt=optimizer), model_parameters=model.groups())
        assert engine.get_lr() == [0.1, 7.0, 0.2]
        engine.backward(engine())
        engine.step()
        close(weight(engine, "a.w") + weight(engine, "b.w"), [0.85, 0.8])
        engine.destroy()
        model = Grouped()
        engine = start(model, settings(cell, opt=optimizer, scheduler=scheduler), model_parameters=model.groups())
        used = []
        for _ in range(4):
            used.append(engine.get_lr())
            engine.backward(engine())
            engine.step()
        close([lr[0] for lr in used], [0, 0, 0.05, 0.1])
        close([lr[2] for lr in used], [0, 0, 0.1, 0.2])
        engine.destroy()


@case("16")
def loss_scale(rank: int, world: int) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.5, "eps": 1e-8}}
    for cell in cells():

        def fp16(w: tuple[float, ...], cell: Cell = cell, **fields: Any) -> pannier.Engine:
            return start(Dot(w), settings(cell, opt=optimizer, fp16={"enabled": True, **fields}))

        def one(engine: pannier.Engine, x: list[float]) -> float:
            engine.backward(engine(torch.tensor(x)))
            engine.step()
            return engine.optimizer.cur_scale

        engine = fp16((0.0, 0.0), initial_scale_power=2, loss_scale_window=2, hysteresis=1)
        assert [one(engine, [3.0, 4.0]) for _ in range(8)] == [4, 4, 8, 8, 16, 16, 32, 32]
        assert engine.get_global_grad_norm() == 5.0
        engine.destroy()
        # A gradient that overflows on one rank skips the step on all.
        engine = fp16((1.0,), initial_scale_power=4, hysteresis=2, loss_scale_window=1000, consecutive_hysteresis=False)
        scales = [one(engine, [math.inf if kind == "o" and rank == 0 else 0.25]) for kind in "ogogoo"]
        assert scales == [16, 16, 8, 8, 4, 2] and engine.skipped_steps == 4
        engine.destroy()


class Norms(Pair):
    def __init__(self) -> None:
        super().__init__(0.0, 0.0)
        self.frozen = Dot((1.0,))
        self.frozen.w.requires_grad_(False)

    def forward(self, a: float = 3.0) -> torch.Tensor:
        one = torch.ones(1)
        return a * self.a(one) + 4.0 * self.b(one) + self.frozen(one)


@case("18")
def gradient_norm(rank: int, world: int) -> None:
    for cell in cells():
        for dtype in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}):
            for gas in (1, 4):
                engine = start(Norms(), settings(cell, gas=gas, **dtype))
                assert engine.get_global_grad_norm() is None
                for _ in range(gas):
                    engine.backward(engine())
                    engine.step()
                norm = engine.get_global_grad_norm()
                assert isinstance(norm, float) and norm == pytest.approx(5.0, rel=1e-5)
                engine.destroy()
        engine = start(Norms(), settings(cell))
        engine.backward(engine(math.inf if rank == world - 1 else 3.0))
        engine.step()
        norm = engine.get_global_grad_norm()
        assert isinstance(norm, float) and not math.isfinite(norm)
        engine.destroy()


@case("20")
def small_gradients(rank: int, world: int) -> None:
    for cell in cells():
        for wish in ({}, {"data_types": {"grad_accum_dtype": "fp32"}}):
            engine = start(Dot(), settings(cell, gas=256, bf16={"enabled": True}, **wish))
            run(engine, [[1.0]] + [[2.0**-9]] * 255)
            close(weight(engine), [-0.0058177])
            engine.destroy()


@case("23")
def every_micro_batch_counts(rank: int, world: int) -> None:
    for cell in cells():
        engine = start(Dot(), settings(cell, gas=4))
        for x in (1.0, 2.0, 3.0):
            run(engine, [[x]])
            assert weight(engine) == [0.0]
        run(engine, [[10.0]])
        close(weight(engine), [-0.8])
        run(engine, [[2.0]] * 4)
        close(weight(engine), [-1.5081949])
        engine.destroy()
        engine = start(Dot(), settings(cell))
        for x in (0.25, 0.5, 0.75, 2.5):
            engine.set_gradient_accumulation_boundary(x == 2.5)
            engine.backward(engine(torch.tensor([x])))
            engine.step()
        close(weight(engine), [-0.8])
        engine.destroy()


@case("25")
def incomplete_window(rank: int, world: int) -> None:
    for cell in cells():
        engine = start(Dot(), settings(cell, gas=4))
        run(engine, [[4.0]] * 4 + [[8.0]] * 2)
        close(weight(engine), [-0.8])
        assert (engine.global_steps, engine.micro_steps) == (1, 6) and not engine.is_gradient_accumulation_boundary()
        run(engine, [[0.0], [0.0]])
        close(weight(engine), [-1.6])
        engine.destroy()


def trained(rank: int, world: int, cell: Cell, gas: int = 2, **zero: Any) -> list[torch.Tensor]:
    micro = BATCH // (gas * world)
    engine = start(mlp(3 + rank), settings(cell, micro=micro, gas=gas, opt=OPTIMIZER, zero=zero))
    for x, y in batches():
        parts = list(zip(x.split(micro), y.split(micro), strict=True))
        for part_x, part_y in parts[rank::world]:
            engine.backward(nn.functional.mse_loss(engine(part_x), part_y))
            engine.step()
    result = [pannier.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    engine.destroy()
    return result


@case("27")
def one_result(rank: int, world: int) -> None:
    # With accumulation, stages 0 and 1 add a rank's micro-batches before they add ranks, stages 2 and 3 the other way
    # round, so each pair has its own last bits; without, every stage has the same.
    firsts: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def require_same(cell: Cell, gas: int = 2, **zero: Any) -> None:
        have = trained(rank, world, cell, gas, **zero)
        first = firsts.setdefault((gas, gas > 1 and cell[0] >= 2), have)
        assert equal(first, have), (cell, gas, zero)

    for cell in cells():
        require_same(cell, gas=1)
        require_same(cell, reduce_bucket_size=7)
    for bucket in (1, 289, 1e9):
        require_same((2, "cpu"), reduce_bucket_size=bucket)
        require_same((3, "param"), reduce_bucket_size=bucket)
    for flag in ("contiguous_gradients", "reduce_scatter", "overlap_comm", "round_robin_gradients"):
        require_same((2, "none"), **{flag: False})
        require_same((2, "cpu"), **{flag: True})
    for first in firsts.values():
        for have, want in zip(first, plain(), strict=True):  # Rank 0's initial weights count.
            torch.testing.assert_close(have, want, **FLAT)
    for cell in cells():
        more = {"prescale_gradients": True, "gradient_predivide_factor": 2.0} if cell[1] == "none" else {}
        engine = start(Dot(), settings(cell, **more))
        run(engine, [[2.0 if world == 1 else 1.0 + 2.0 * rank / (world - 1)]])  # The mean is 2.
        close(weight(engine), [-2 / 3])
        engine.destroy()


@case("28")
def tied_weights(rank: int, world: int) -> None:
    rows = [-0.0024249, 0.1218363, 0.2160558, 0.3343268, 0.4465069, 0.5623966, 0.7250521, 0.8436102]
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "eps": 1.0, "weight_decay": 0.0}}
    for cell in cells():
        model = Tied()
        engine = start(model, settings(cell, opt=optimizer))
        losses, norms = [], []
        for _ in range(2):
            loss = engine(torch.tensor([1, 2]))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        close(losses, [0.22924805, 0.19200754])
        close(norms, [0.7344737, 0.6425920])
        close(torch.tensor(weight(engine, "emb.weight")).flatten().tolist(), rows)
        state = engine.module_state_dict()
        assert torch.equal(state["emb.weight"], state["head.weight"]) and model.emb.weight is model.head.weight
        fresh = Tied()
        fresh.load_state_dict(state)
        close(fresh.head.weight.detach().flatten().tolist(), rows)
        assert torch.equal(state["twin_b"], torch.arange(8.0).view(4, 2) / 8)
        engine.destroy()


class Some(Pair):
    def forward(self, uses: str) -> torch.Tensor:
        one = torch.ones(1)
        return sum(getattr(self, name)(one) for name in uses)


@case("30")
def unused_parameters(rank: int, world: int) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.0}}
    for cell in cells():
        engine = start(Some(1.0, 1.0), settings(cell, opt=optimizer))
        a, b = [], []
        for uses in ("ab", "a", "ab"):
            engine.backward(engine(uses))
            engine.step()
            a += weight(engine, "a.w")
            b += weight(engine, "b.w")
        close(a, [0.9, 0.8, 0.7])
        close(b, [0.9, 0.9, 0.8])  # torch's rule: no gradient on any rank, no step.
        engine.destroy()
        engine = start(Some(1.0, 1.0), settings(cell, opt=optimizer))
        for _ in range(3):
            engine.backward(engine("a"))
            engine.step()
        assert weight(engine, "b.w") == [1.0]
        engine.destroy()
        if cell[0] == 3:
            continue  # Other ways on other ranks are case 34.
        engine = start(Some(0.0, 0.0), settings(cell))
        engine.backward(engine("a" if rank == 0 else "b"))
        engine.step()
        share = 1 / world
        close(weight(engine, "a.w"), [-share / (share + 1)])
        close(weight(engine, "b.w"), [-(1 - share) / (2 - share)])
        engine.destroy()


@case("32")
def strides(rank: int, world: int) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    want = torch.tensor([[-0.5, 2.3333333], [0.25, 3.2], [1.1666667, 4.1428571]])
    for cell in cells():
        model = Turned()
        engine = start(model, settings(cell))
        loss = engine(x)
        assert loss.item() == Turned()(x).item()
        engine.backward(loss)
        engine.step()
        torch.testing.assert_close(pannier.safe_get_full_fp32_param(model.w), want, **FLAT)
        torch.testing.assert_close(engine.module_state_dict()["w"], want, **FLAT)
        engine.destroy()


def results_of(bodies: Mapping[str, Callable[[int, int], None]], rank: int, world: int) -> dict[str, str]:
    """What each came to; "" is right. What failed on one rank may end the others too."""
    results = {}
    for name, body in bodies.items():
        try:
            body(rank, world)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    return results


def chosen_cases(rank: int, world: int, *numbers: str) -> dict[str, str]:
    """What each case came to."""
    return results_of({number: CASES[number] for number in numbers}, rank, world)
