"""Relatives of the handed cases on several ranks: one process a rank runs each in a few stages and homes.

What comes out is compared to plain torch on the mean of the ranks' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pannier
from case_models import OPT1, Dot, Pair, run, start, weight
from rank_cases import Cell, close, results_of, settings

KIN: dict[str, Callable[[int, int], None]] = {}
SGD = {"type": "SGD", "params": {"lr": 1.0}}
CELLS: list[Cell] = [(1, "cpu"), (2, "nvme"), (3, "param")]  # Each way of partitioning, and each home.


def kin(body: Callable[[int, int], None]) -> Callable[[int, int], None]:
    KIN[body.__name__] = body
    return body


class Odds(nn.Module):
    """Parameters of 0 and 1 elements, with and without dimensions, before, between and behind others."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))
        self.first = nn.Parameter(torch.full((8,), 1.0 + rank))
        self.rows = nn.Parameter(torch.empty(0, 8))
        self.scalar = nn.Parameter(torch.tensor(2.0 + rank))
        self.columns = nn.Parameter(torch.empty(3, 0))
        self.one = nn.Parameter(torch.full((1, 1), 3.0 + rank))
        self.last = nn.Parameter(torch.empty(2, 0, 2))

    def forward(self, x: float) -> torch.Tensor:
        empty = self.none.sum() + (self.rows @ self.first).sum() + self.columns.sum() + self.last.sum()
        return x * (self.first.sum() + 3 * self.scalar + 2 * self.one.sum()) + empty


def mean_of(rank: int, world: int) -> tuple[float, float]:
    """This rank's share, and the mean over ranks."""
    shares = [1.0 + rank for rank in range(world)]
    return shares[rank], sum(shares) / world


@kin
def parameters_of_few_elements(rank: int, world: int) -> None:
    share, mean = mean_of(rank, world)
    for cell in CELLS:
        model = Odds(rank)
        shapes = [tuple(param.shape) for param in model.parameters()]
        engine = start(model, settings(cell))
        plain = Odds()
        reference = torch.optim.AdamW(plain.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
        for _ in range(2):
            engine.backward(engine(share))
            engine.step()
            plain.zero_grad()
            plain(mean).backward()
            reference.step()
        assert engine.get_global_grad_norm() == pytest.approx(mean * math.sqrt(8 + 9 + 4), rel=1e-5)
        assert [tuple(value.shape) for value in engine.module_state_dict().values()] == shapes
        for (name, want), shape in zip(plain.named_parameters(), shapes, strict=True):
            param = dict(model.named_parameters())[name]
            have = pannier.safe_get_full_fp32_param(param)
            torch.testing.assert_close(have, want.detach(), rtol=0, atol=1e-6)
            assert engine.optimizer.state[param]["exp_avg"].shape == shape
        engine.destroy()


@kin
def clipping_is_that_of_all_ranks_and_groups(rank: int, world: int) -> None:
    share, mean = mean_of(rank, world)
    for cell in CELLS:
        model = Pair(0.0, 0.0)
        groups = [{"params": [model.a.w]}, {"params": [model.b.w], "lr": 0.5}]
        engine = start(model, settings(cell, gas=2, opt=SGD, gradient_clipping=1e-3), model_parameters=groups)
        for _ in range(2):
            x = torch.tensor([share])
            engine.backward(3 * model.a(x) + 4 * model.b(x))
            engine.step()
        factor = 1e-3 / (5 * mean + 1e-6)
        assert engine.get_global_grad_norm() == pytest.approx(5 * mean, rel=1e-5)
        have = weight(engine, "a.w") + weight(engine, "b.w")
        assert have == pytest.approx([-3 * mean * factor, -2 * mean * factor], rel=1e-5)
        engine.destroy()


@kin
def sums_that_fp16_cannot_hold(rank: int, world: int) -> None:
    optimizer = {"type": "SGD", "params": {"lr": 1e-4}}
    for cell in CELLS[::2]:
        engine = start(Dot(), settings(cell, gas=4, opt=optimizer, fp16={"enabled": True, "loss_scale": 1}))
        run(engine, [[60000.0]] * 4)
        close(weight(engine), [-6.0], 1e-5)
        assert engine.skipped_steps == 0 and engine.get_global_grad_norm() == 60000.0
        engine.destroy()


def overflow_in(cell: Cell, gas: int = 3) -> pannier.Engine:
    scaler = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    return start(Dot((1.0,)), settings(cell, gas=gas, opt=OPT1, fp16=scaler))


@kin
def overflow_in_one_micro_batch_of_one_rank(rank: int, world: int) -> None:
    for cell in CELLS[::2]:
        engine, other = overflow_in(cell), overflow_in(cell)
        run(engine, [[2.0]] * 3)
        before = weight(engine)
        for bad in range(3):
            run(engine, [[math.inf if micro == bad and rank == world - 1 else 2.0] for micro in range(3)])
            assert weight(engine) == before and engine.optimizer.overflow and not engine.was_step_applied()
            assert engine.optimizer.cur_scale == 8 / 2**bad and engine.skipped_steps == bad + 1
        run(engine, [[2.0]] * 3)
        run(other, [[2.0]] * 6)  # What the windows that were skipped leave behind is nothing.
        assert weight(engine) == weight(other)
        engine.destroy()
        other.destroy()


@kin
def gradients_of_very_different_sizes(rank: int, world: int) -> None:
    _, mean = mean_of(rank, world)
    for cell in CELLS[:1]:
        for size in (1e30, 1e-30):
            optimizer = {"type": "SGD", "params": {"lr": 1 / size}}
            engine = start(Dot((0.0, 0.0)), settings(cell, opt=optimizer))
            run(engine, [[3 * size * (1 + rank), 4 * size * (1 + rank)]])
            assert engine.get_global_grad_norm() == pytest.approx(5 * size * mean, rel=1e-5)
            assert weight(engine) == pytest.approx([-3 * mean, -4 * mean], rel=1e-5)
            assert engine.skipped_steps == 0
            engine.destroy()


@kin
def window_changed_between_steps(rank: int, world: int) -> None:
    share, mean = mean_of(rank, world)
    for cell in CELLS[::2]:
        engine = start(Dot(), settings(cell, gas=1, opt=SGD))
        for gas in (2, 3, 1):
            engine.set_train_batch_size(gas * world)
            run(engine, [[share * (micro + 1)] for micro in range(gas)])
        assert engine.global_steps == 3
        close(weight(engine), [-mean * (1.5 + 2 + 1)])
        engine.destroy()


class Loop(nn.Module):
    """A part that runs any number of times, recomputed in the old way, so that its gradients come one a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.again, x, use_reentrant=True).tanh()
        return x.pow(2).mean()


def loop() -> Loop:
    torch.manual_seed(0)
    return Loop()


@kin
def a_part_that_runs_more_often_than_before(rank: int, world: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for cell in CELLS:
        for gas in (1, 2):
            model, plain = loop(), loop()
            engine = start(model, settings(cell, gas=gas, opt=SGD, zero={"reduce_bucket_size": 8}))
            reference = torch.optim.SGD(plain.parameters(), lr=1.0)
            for step, times in enumerate((1, 2, 1, 4)):
                for micro in range(gas):
                    # Ranks run a unit of stage 3 as often as each other.
                    each = [times + (micro > 0) + (cell[0] < 3 and step > 1 and other == 0) for other in range(world)]
                    for other in each:
                        (plain(x, other) / world / gas).backward()
                    engine.backward(engine(x, each[rank]))
                    if micro == gas - 1 and cell[0] > 1:
                        grad = pannier.safe_get_full_grad(model.again.weight)
                        torch.testing.assert_close(grad, plain.again.weight.grad, rtol=0, atol=1e-6)
                    engine.step()
                norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()]).item()
                assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
                reference.step()
                reference.zero_grad()
            for name, want in plain.named_parameters():
                torch.testing.assert_close(torch.tensor(weight(engine, name)), want.detach(), rtol=0, atol=1e-5)
            engine.destroy()


@kin
def backwards_of_the_callers_own_in_any_number(rank: int, world: int) -> None:
    share, mean = mean_of(rank, world)
    for cell in CELLS:
        engine = start(Dot(), settings(cell, opt=SGD))
        for number in (1, 3, 2):
            for _ in range(number):
                engine(torch.tensor([share])).backward()
            engine.step()
        close(weight(engine), [-6 * mean])
        engine.destroy()


@kin
def one_rank_reports_for_all(rank: int, world: int) -> None:
    reports = {"steps_per_print": 1, "wall_clock_breakdown": True} if rank == 0 else {}
    engine = start(Dot(), settings((2, "cpu"), **reports))
    run(engine, [[4.0]])
    close(weight(engine), [-0.8])
    engine.destroy()


@kin
def unlike_settings_are_named(rank: int, world: int) -> None:
    other = {"type": "AdamW", "params": {"lr": 0.5, "eps": 1.0}}
    for name, first, second in (
        ("train_batch_size", {"gas": 1}, {"gas": 2}),
        ("lr", {"opt": OPT1}, {"opt": other}),
    ):
        with pytest.raises(pannier.ConfigError, match="rank 1 differs from rank 0") as error:
            start(Dot(), settings((2, "cpu"), **(first if rank == 0 else second)))
        assert f'"{name}"' in str(error.value)


def all_kin(rank: int, world: int) -> dict[str, str]:
    """What each came to."""
    return results_of(KIN, rank, world)
