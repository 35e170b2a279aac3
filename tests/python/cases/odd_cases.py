"""Models and loops that went wrong for people elsewhere: each body trains beside plain torch, on one rank or several."""

from __future__ import annotations

import collections
import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import pannier
from case_models import start
from rank_cases import Cell, settings

Body = Callable[[int, int, Cell], None]
Loss = Callable[[Any, Any, torch.Tensor], torch.Tensor]
BODIES: dict[str, Body] = {}
CELLS = {
    1: [(0, "none"), (2, "nvme"), (3, "param")],
    2: [(0, "none"), (2, "cpu"), (3, "none")],
}
ADAMW = {"type": "AdamW", "params": {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.01}}


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


def engine_of(model: nn.Module, cell: Cell, **kw: Any) -> pannier.Engine:
    return start(model, settings(cell, opt=ADAMW, **{"pannier": {"collective_timeout": 30}, **kw}))


def inputs(step: int, number: int, numel: int = 4) -> torch.Tensor:
    return torch.randn(3, numel, generator=torch.Generator().manual_seed(100 * step + number))


def step(engine: pannier.Engine, number: int, rank: int) -> None:
    engine.backward(engine(inputs(number, rank)))
    engine.step()


class Twins:
    """A model under an engine, and plain copies of it, one for each rank, that step by the mean of their gradients."""

    def __init__(self, make: Callable[[], nn.Module], world: int) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.plain = []
        for _ in range(world):
            torch.manual_seed(0)
            self.plain.append(make())
        self.optimizers = [torch.optim.AdamW(plain.parameters(), lr=0.05, eps=1e-2) for plain in self.plain]

    def step(self) -> None:
        for params in zip(*[plain.parameters() for plain in self.plain], strict=True):
            if gradients := [param.grad for param in params if param.grad is not None]:
                for param in params:
                    param.grad = sum(gradients) / len(self.plain)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def require_equal(self, rank: int) -> None:
        for (name, param), plain in zip(self.model.named_parameters(), self.plain[rank].parameters(), strict=True):
            have = pannier.safe_get_full_fp32_param(param)
            torch.testing.assert_close(have, plain.detach(), rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        for (name, buffer), plain in zip(self.model.named_buffers(), self.plain[rank].buffers(), strict=True):
            torch.testing.assert_close(buffer, plain, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def train(
    make: Callable[[], nn.Module], rank: int, world: int, cell: Cell, loss: Loss = lambda call, model, x: call(x),
    prepare: Callable[[nn.Module], None] = lambda model: None, gas: int = 1, numel: int = 4,
) -> None:  # fmt: skip
    """Two steps. `loss` is a function of the engine (or the plain model), the model and the inputs; `prepare` is done
    to a model after it has its engine."""
    twins = Twins(make, world)
    engine = engine_of(twins.model, cell, gas=gas)
    for model in (twins.model, *twins.plain):
        prepare(model)
    for number in range(2):
        for micro in range(gas):
            for other, plain in enumerate(twins.plain):
                (loss(plain, plain, inputs(number, 10 * micro + other, numel)) / gas).backward()
            engine.backward(loss(engine, twins.model, inputs(number, 10 * micro + rank, numel)))
            engine.step()
        twins.step()
    twins.require_equal(rank)
    engine.destroy()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()).pow(2).mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.parts = nn.ModuleDict({"c": nn.Linear(4, 4, bias=False), "words": nn.Embedding(4, 4)})
        self.b.weight = self.parts["c"].weight = self.parts["words"].weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["c"](self.b(self.a(x)).tanh() + self.parts["words"].weight.t()[:3]).pow(2).mean()


@body
def one_weight_in_four_places(rank: int, world: int, cell: Cell) -> None:
    train(Tied, rank, world, cell)


@body
def what_is_tied_or_untied_later_is_named(rank: int, world: int, cell: Cell) -> None:
    for make, weight in ((Two, None), (Tied, torch.nn.Parameter(torch.ones(4, 4)))):
        model = make()
        engine = engine_of(model, cell)
        model.b.weight = model.a.weight if weight is None else weight
        with pytest.raises(pannier.ConfigError, match=r"b\.weight is not the object that initialize\(\) saw"):
            step(engine, 0, rank)
        engine.destroy()


class Slices(nn.Module):
    """Parameters that are slices of one storage, strided and interleaved; one without dimensions, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(24.0) / 24
        self.even, self.odd = nn.Parameter(memory[:8:2]), nn.Parameter(memory[1:8:2])
        self.turned, self.tail = nn.Parameter(memory[8:16].view(2, 4).t()), nn.Parameter(memory[16:20])
        self.number, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.even + self.odd) @ self.turned * self.number + self.empty.sum()
        return y.pow(2).mean() + (x * self.tail).sum().tanh()


@body
def slices_of_one_memory(rank: int, world: int, cell: Cell) -> None:
    train(Slices, rank, world, cell)


class Normed(nn.Module):
    """Weights that are computed before each forward, with buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.weight_norm(nn.Linear(4, 4))
        self.b = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.c = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.d = parametrizations.orthogonal(nn.Linear(4, 4))
        self.e = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.e(self.d(self.c(self.b(self.a(x).tanh()).tanh()))).pow(2).mean()


@body
def computed_weights(rank: int, world: int, cell: Cell) -> None:
    train(Normed, rank, world, cell)


# --- weights that are read beside their module's forward ---


def read_weights_in_hooks(model: Any) -> None:
    model.a.register_forward_hook(lambda part, args, output: output + part.weight.sum() / 10)
    model.b.register_forward_pre_hook(lambda part, args: (args[0] * part.bias.sum(),))


@body
def hooks_that_read_weights(rank: int, world: int, cell: Cell) -> None:
    train(Two, rank, world, cell, prepare=read_weights_in_hooks)


class ReadsAhead(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.b.weight.mean() + self.b.bias)


@body
def a_weight_read_before_its_module(rank: int, world: int, cell: Cell) -> None:
    train(ReadsAhead, rank, world, cell, gas=2)


@body
def hooks_that_change_gradients(rank: int, world: int, cell: Cell) -> None:
    def prepare(model: Any) -> None:
        model.a.weight.register_hook(lambda gradient: 3 * gradient)
        model.a.register_full_backward_hook(lambda part, given, got: tuple(None if g is None else 2 * g for g in given))
        model.b.register_full_backward_pre_hook(lambda part, got: tuple(g / 2 for g in got))

    train(Two, rank, world, cell, prepare=prepare, loss=lambda call, model, x: call(x.requires_grad_()))


# --- recomputation, and inputs that are leaves ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed(nn.Module):
    """The inputs are leaves that want gradients, and so are those of a part that is recomputed in the old way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def nested(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        if self.kind.startswith("nested"):
            x = checkpoint(self.nested, x, self.kind == "nested old", use_reentrant=self.kind == "nested old")
            x = self.blocks[3](self.blocks[2](x))
        elif self.kind.startswith("whole"):
            x = checkpoint(self.run, x, use_reentrant=self.kind == "whole old")
        elif self.kind == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        elif self.kind == "in rows":
            x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)
        else:
            with torch.autograd.graph.save_on_cpu():
                x = self.run(x)
        return x.pow(2).mean()


@body
def recomputation_of_every_kind(rank: int, world: int, cell: Cell) -> None:
    if cell[0] < 3:
        return  # No weight is released there.
    for kind in ("nested", "nested old", "whole", "whole old", "selective", "in rows", "kept on the CPU"):
        train(lambda kind=kind: Recomputed(kind), rank, world, cell, gas=2)


# --- what modules return ---


class Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.inside, self.beside = {"tensor": tensor}, None


class Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


RETURNS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "object": (Box, lambda box: box.inside["tensor"]),
    "slots": (Slots, lambda slots: slots.tensor),
    "set": (lambda tensor: {tensor, 1}, lambda found: next(value for value in found if isinstance(value, torch.Tensor))),
    "deque": (lambda tensor: collections.deque([None, tensor]), lambda found: found.pop()),
    "iterator": (lambda tensor: iter([tensor]), next),
    "function": (lambda tensor: lambda: tensor, lambda function: function()),
}


class Returning(nn.Module):
    """Each block returns its tensor inside of something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Holding(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = RETURNS[self.kind][1](block(x))
        return x.pow(2).mean()


class Holding(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return RETURNS[self.kind][0](super().forward(x))


@body
def outputs_of_every_kind(rank: int, world: int, cell: Cell) -> None:
    if cell[0] < 3:
        return  # No weight is released there.
    for kind in RETURNS:
        train(lambda kind=kind: Returning(kind), rank, world, cell, gas=2)


# --- gradients of gradients ---


def penalty(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    loss = call(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (gradient.norm() - 1).pow(2)


def penalty_alone(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    return penalty(call, model, x) - call(x)


def of_a_weight(call: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = call(x)
    (gradient,) = torch.autograd.grad(loss, [model.b.weight], create_graph=True)
    return loss + gradient.pow(2).sum()


@body
def penalties_on_gradients(rank: int, world: int, cell: Cell) -> None:
    for loss in (penalty, penalty_alone, of_a_weight):
        train(Two, rank, world, cell, loss=loss, gas=2)


class Forces(Two):
    """An energy whose gradient the loss uses; asked for inside forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x), x, create_graph=True)
        return force.pow(2).sum()


@body
def a_forward_that_asks_for_gradients(rank: int, world: int, cell: Cell) -> None:
    train(Forces, rank, world, cell)


# --- edits ---


@body
def edits_through_data_in_gathered_parameters(rank: int, world: int, cell: Cell) -> None:
    """Clipping of weights, as people write it."""
    for modifier in (None, 0):
        twins = Twins(Two, world)
        engine = engine_of(twins.model, cell)
        for number in range(3):
            for other, plain in enumerate(twins.plain):
                plain(inputs(number, other)).backward()
            step(engine, number, rank)
            twins.step()
            for plain in twins.plain:
                for param in plain.parameters():
                    param.data.clamp_(-0.2, 0.2)
            with pannier.zero.GatheredParameters(twins.model.parameters(), modifier_rank=modifier):
                for param in twins.model.parameters() if modifier in (None, rank) else ():
                    param.data.clamp_(-0.2, 0.2)
        twins.require_equal(rank)
        engine.destroy()


@body
def a_look_leaves_masters_as_they_are(rank: int, world: int, cell: Cell) -> None:
    torch.manual_seed(0)
    model = Two()
    engine = engine_of(model, cell, bf16={"enabled": True})
    engine.backward(engine(inputs(0, rank).bfloat16()).float())
    engine.step()
    before = pannier.safe_get_full_fp32_param(model.a.weight)
    assert not torch.equal(before, before.bfloat16().float())
    for value, modifier in ((2.0, None), (4.0, world - 1)):
        with pannier.zero.GatheredParameters(model.parameters(), modifier_rank=modifier), torch.no_grad():
            if modifier in (None, rank):
                model.b.bias.fill_(value)
        assert torch.equal(pannier.safe_get_full_fp32_param(model.a.weight), before)
        assert (pannier.safe_get_full_fp32_param(model.b.bias) == value).all()
    with torch.inference_mode(), pannier.zero.GatheredParameters(model.parameters()):
        model.b.bias.fill_(3.0)
    assert (pannier.safe_get_full_fp32_param(model.b.bias) == 3.0).all()
    engine.backward(engine(inputs(1, rank).bfloat16()).float())
    engine.step()
    engine.destroy()


class Words(nn.Module):
    """An embedding that shortens its rows while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x.flatten().mul(10).long().abs() % 6).sum().tanh()


@body
def edits_of_other_values_on_each_rank(rank: int, world: int, cell: Cell) -> None:
    """The same is right, and whatever differs is an error on all."""
    if world == 1:
        train(Words, rank, world, cell)
        return
    torch.manual_seed(0)
    model = Two()
    engine = engine_of(model, cell)
    state = copy.deepcopy(model.state_dict())
    state["a.bias"] = torch.full((4,), 2.0)
    model.load_state_dict(state)
    step(engine, 0, rank)
    state["a.bias"] = torch.full((4,), float(rank))
    model.load_state_dict(state)
    with pytest.raises(pannier.ConfigError, match=r"a\.bias: 1 updates, edited to values"):
        step(engine, 1, rank)
    engine.destroy()


@body
def edits_before_a_block_are_not_the_blocks(rank: int, world: int, cell: Cell) -> None:
    """All ranks load the same; then one of them writes."""
    model = Two()
    engine = engine_of(model, cell)
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
    with pannier.zero.GatheredParameters(model.b.weight, modifier_rank=0), torch.no_grad():
        if rank == 0:
            model.b.weight.fill_(1.0)
    step(engine, 0, rank)
    engine.destroy()


@body
def engines_in_a_row_leave_nothing(rank: int, world: int, cell: Cell) -> None:
    open_now = []
    for number in range(4):
        engine = engine_of(Two(), cell)
        step(engine, 0, rank)
        engine.destroy()
        open_now.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert all(after - before < 6 for before, after in zip(open_now[0], open_now[3], strict=True)), open_now


# --- looks without gradients ---


@body
def looks_in_inference_mode(rank: int, world: int, cell: Cell) -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Last()), world)
    engine = engine_of(twins.model, cell)
    for number in range(2):
        engine.eval()
        with torch.inference_mode():
            engine(inputs(9, 0))
        engine.train()
        for other, plain in enumerate(twins.plain):
            plain(inputs(number, other)).backward()
        step(engine, number, rank)
        twins.step()
    twins.require_equal(rank)
    engine.destroy()


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.tanh()).pow(2).mean()


@body
def a_frozen_judge(rank: int, world: int, cell: Cell) -> None:
    """A generator trained through a discriminator that is frozen for that time only."""
    makers, judges = Twins(lambda: nn.Linear(4, 4), world), Twins(Two, world)
    maker, judge = engine_of(makers.model, cell), engine_of(judges.model, cell)
    for number in range(2):
        for other in range(world):
            fake = makers.plain[other](inputs(number, other)).detach()
            (judges.plain[other](fake) - judges.plain[other](inputs(number, 20 + other))).backward()
        judges.step()
        judge.backward(judge(maker(inputs(number, rank)).detach()) - judge(inputs(number, 20 + rank)))
        judge.step()
        for other in range(world):
            (-judges.plain[other](makers.plain[other](inputs(number, 40 + other)))).backward()
            judges.plain[other].zero_grad()
        makers.step()
        judges.model.requires_grad_(False)
        maker.backward(-judge(maker(inputs(number, 40 + rank))))
        judges.model.requires_grad_(True)
        maker.step()
    makers.require_equal(rank)
    judges.require_equal(rank)
    maker.destroy()
    judge.destroy()
