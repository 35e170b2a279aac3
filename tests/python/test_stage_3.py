"""Stage 3: each rank keeps its shard of the parameters; units are whole while they run, forward and backward."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pannier
import ranks
from reference import OPTIMIZERS, config
from test_ranks import digest

PROGRAMS: dict[str, ranks.Program] = {}
STEPS = 4
TIMEOUT = {"pannier": {"collective_timeout": 20}}


def program(body: ranks.Program) -> ranks.Program:
    PROGRAMS[body.__name__] = body
    return body


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.frozen = torch.nn.Linear(2 * width, 2 * width)
        self.frozen.requires_grad_(False)
        self.down = torch.nn.Linear(2 * width, width)
        self.spare = torch.nn.Linear(width, width)  # Never called.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.frozen(functional.gelu(self.up(self.norm(x)))).tanh())


class Tower(torch.nn.Module):
    """Rows of blocks, one of them called twice, a head that reads the embedding's weight outside of its module, and a
    parameter of the model's own."""

    def __init__(self, width: int = 24, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(16, width)
        self.shift = torch.nn.Parameter(torch.randn(width))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.side = torch.nn.Linear(width, 16)
        self.side.weight = self.embed.weight  # Tied.

    def forward(self, tokens: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) if kind == "plain" else checkpoint(block, x, use_reentrant=kind == "reentrant")
        x = self.norm(x)
        return (functional.linear(x, self.embed.weight) + self.side(x)).logsumexp(-1).mean()


def tokens(step: int, number: int) -> torch.Tensor:
    return torch.randint(16, (3, 5), generator=torch.Generator().manual_seed(100 * step + number))


def settings(**options: Any) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 700, **options.pop("zero", {})}
    if options.pop("param_offload", False):
        zero["offload_param"] = {"device": "cpu"}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}}
    return config(optimizer, stage=3, zero=zero, **{**TIMEOUT, **options})


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Masters, and what is not trained."""
    with pannier.zero.GatheredParameters([param for param in model.parameters() if not param.requires_grad]):
        frozen = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    return {
        name: frozen[name] if name in frozen else pannier.safe_get_full_fp32_param(param)
        for name, param in model.named_parameters()
    }


def plain_weights(world: int, gas: int, clipping: float) -> dict[str, torch.Tensor]:
    plain = Tower().double()
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], lr=0.01, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(gas * world):
            plain(tokens(step, number)).div(gas * world).backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clipping)
        optimizer.step()
    return dict(plain.named_parameters())


HOMES = list(itertools.product((False, True), (False, True), (700, 10**6), (0, 50)))


@program
def models(rank: int, world: int) -> Any:
    wrong: list[str] = []
    everything = []
    for gas, clipping in ((1, 0.0), (2, 0.05)):
        want = plain_weights(world, gas, clipping)
        bits: dict[str, str] = {}
        for kind, homes in (("plain", HOMES), ("reentrant", HOMES[::5]), ("not reentrant", HOMES[::5])):
            for offload, param_offload, bucket, small in homes:
                cell = f"{kind}, offload {offload}, param offload {param_offload}, bucket {bucket}, small {small}, gas {gas}"
                zero = {"stage3_param_persistence_threshold": small, "reduce_bucket_size": bucket}
                model = Tower()
                engine, _, _, _ = pannier.initialize(
                    model=model,
                    config=settings(offload=offload, param_offload=param_offload, gas=gas, clipping=clipping, zero=zero),
                )
                for step in range(STEPS):
                    for micro in range(gas):
                        engine.backward(engine(tokens(step, micro * world + rank), kind))
                        engine.step()
                have = weights(model)
                for name, tensor in want.items():
                    if (have[name].double() - tensor).abs().max() > 2e-6:
                        wrong.append(f"{cell}: {name} is off by {(have[name].double() - tensor).abs().max().item()}")
                bits[cell] = digest(list(have.values()))
                engine.destroy()
        if len(set(bits.values())) != 1:
            wrong.append(f"bits differ: {bits}")
        everything += sorted(set(bits.values()))
    return {"wrong": wrong, "bits": everything}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_models_train_as_plain_torch_does(world: int) -> None:
    results = [ended.result for ended in ranks.run(__file__, "models", world)]
    assert [result["wrong"] for result in results] == [[]] * world
    assert all(result["bits"] == results[0]["bits"] for result in results), "ranks hold different bits"


class Even(torch.nn.Module):
    """Units whose parameters are whole blocks, so that shards of two or four ranks are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.float().square().mean()


@program
def streams(rank: int, world: int) -> Any:
    """Digests of weights and moments by cell; all must be the same. Random delays shake races out."""
    bits = {}
    cells = [("none", False, 0.0, False, 0)]
    cells += [
        ("cpu", *cell, seed)
        for seed, cell in enumerate(itertools.product((False, True), (0.0, 0.5, 1.0), (False, True)), start=1)
    ]
    for home, param_offload, share, overlap, seed in cells:
        model = Tower()
        own: dict[str, Any] = {**TIMEOUT["pannier"], "stress_seed": seed}
        if home == "cpu":
            own |= {"streamed_share": share, "overlap_step": overlap}
        engine, optimizer, _, _ = pannier.initialize(
            model=model,
            config=settings(offload=home == "cpu", param_offload=param_offload, clipping=0.05, pannier=own),
        )
        for step in range(2 * STEPS):
            if step == STEPS:
                with pannier.zero.GatheredParameters([model.shift, model.norm.weight], modifier_rank=0):
                    model.norm.weight.data.mul_(0.5)
            engine.backward(engine(tokens(step, rank)))
            engine.step()
        have = [*weights(model).values()]
        for param in model.parameters():
            if param.requires_grad:
                have.append(pannier.safe_get_full_optimizer_state(param, "exp_avg_sq"))
        bits[f"{home}, params {param_offload}, share {share}, overlap {overlap}"] = digest(have)
        engine.destroy()
    return bits


@pytest.mark.parametrize("world", [1, 2])
def test_neither_streaming_nor_overlap_changes_a_bit(world: int) -> None:
    for ended in ranks.run(__file__, "streams", world):
        assert len(set(ended.result.values())) == 1, ended.result


@program
def wire(rank: int, world: int) -> Any:
    results = {}
    for gas, param_offload in itertools.product((1, 3), (False, True)):
        torch.manual_seed(0)
        engine, _, _, _ = pannier.initialize(model=Even(), config=settings(dtype="bf16", gas=gas, param_offload=param_offload))
        sent = []
        for _ in range(3):
            before = engine.wire_bytes()
            for _ in range(gas):
                engine.backward(engine(torch.ones(2, 128, dtype=torch.bfloat16)))
                engine.step()
            after = engine.wire_bytes()
            sent.append({key: after[key] - before[key] for key in after})
        results[str(gas)] = sent
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_wire_bytes_are_two_gathers_and_one_reduction(world: int) -> None:
    numel = 4 * 128 * 128
    for ended in ranks.run(__file__, "wire", world):
        for gas in (1, 3):
            for sent in ended.result[str(gas)]:
                share = (world - 1) / world * numel * gas * 2
                assert sent["parameters"] == pytest.approx(2 * share, rel=0.01)
                assert sent["gradients"] == pytest.approx(share, rel=0.01)


@program
def rest(rank: int, world: int) -> Any:
    """Bytes of parameters at rest, and at the peak of a step, by home."""
    results = {}
    for param_offload in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(16)])
        engine, _, _, _ = pannier.initialize(
            model=model, config=settings(dtype="bf16", offload=True, param_offload=param_offload, zero={"stage3_prefetch_bucket_size": 1})
        )
        parameters = []
        for _ in range(3):
            engine.reset_peak_memory()
            engine.backward(engine(torch.ones(2, 256, dtype=torch.bfloat16)).float().sum())
            engine.step()
            owner = engine.memory_stats()["device"]["by_owner"]["parameters"]
            parameters.append([owner["current"], owner["peak"]])
        results[str(param_offload)] = parameters
        planned = json.loads(engine.core.plan())["device"]["parameters"]
        assert max(peak for _, peak in parameters) <= 1.03 * planned
        resting = json.loads(engine.core.plan())["host"]["parameters"]
        assert abs(resting - (param_offload * 16 * 2 * 256 * 256 / world)) <= 4096
        assert len(engine.optimizer.state_dict()["state"]) == 16
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_rest_in_shares_and_few_are_whole_at_once(world: int) -> None:
    unit = 2 * 256 * 256
    for ended in ranks.run(__file__, "rest", world):
        for home, steps in ended.result.items():
            resting = 0 if home == "True" else 16 * unit / world
            if world == 1 and home == "False":
                continue  # Nothing to partition: they are whole.
            for current, peak in steps:
                assert current <= 1.02 * resting + 4096
                assert peak <= 1.02 * resting + 4 * unit


def test_parameters_have_left_the_device_when_initialize_returns() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(8)])
    slow = settings(dtype="bf16", offload=True, param_offload=True, pannier={"stress_seed": 3})
    engine, _, _, _ = pannier.initialize(model=model, config=slow)
    left = engine.memory_stats()["device"]["by_owner"]["parameters"]["current"]
    engine.destroy()
    assert left == 0


@program
def access(rank: int, world: int, param_offload: str) -> Any:
    """Reading and writing a weight from outside: the right value, or an error that says what to do."""
    model = Tower(seed=rank + 5)  # Each rank draws its own.
    want = {name: param.detach().clone() for name, param in Tower().named_parameters()}
    engine, _, _, _ = pannier.initialize(model=model, config=settings(param_offload=param_offload == "cpu"))
    weight = model.blocks[1].up.weight
    bias = model.blocks[1].up.bias
    for read in (lambda: weight.sum(), lambda: weight[0, 0].item(), lambda: weight.detach().zero_(), lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="was read while it was partitioned"):
            read()
    assert weight.shape == (48, 24)
    # state_dict() is whole and outlives what it was made of; tied ones included.
    state = model.state_dict()
    assert all(torch.equal(state[name], want[name]) for name in want)
    assert torch.equal(state["side.weight"], want["embed.weight"])
    with pannier.zero.GatheredParameters([weight, bias]):
        assert torch.equal(weight, want["blocks.1.up.weight"])
        kept = weight.detach()
    for value in (weight, kept):
        with pytest.raises(RuntimeError, match="partitioned"):
            value.sum()
    with pannier.zero.GatheredParameters(weight, modifier_rank=world - 1), torch.no_grad():
        if rank == world - 1:
            weight.fill_(0.25)
    assert torch.equal(pannier.safe_get_full_fp32_param(weight), torch.full((48, 24), 0.25))
    with pytest.raises(ArithmeticError), pannier.zero.GatheredParameters(weight, modifier_rank=0):
        raise ArithmeticError
    if world > 1:
        with pytest.raises(pannier.ConfigError, match="not its modifier_rank 0"):
            with pannier.zero.GatheredParameters(bias, modifier_rank=0), torch.no_grad():
                bias.fill_(rank)
        assert torch.equal(pannier.safe_get_full_fp32_param(bias), torch.zeros(48))
    pannier.safe_set_full_fp32_param(bias, torch.full((48,), 0.5))
    with pannier.zero.GatheredParameters(bias):
        assert torch.equal(bias, torch.full((48,), 0.5))
    # A forward without gradients, in evaluation, is the plain model's.
    plain = Tower()
    plain.load_state_dict(model.state_dict())
    engine.eval()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(engine(tokens(0, 0)), plain(tokens(0, 0)))
    engine.train()
    # Two forwards before one backward; a gradient, whole.
    loss = engine(tokens(1, rank)) + engine(tokens(2, rank))
    engine.backward(loss)
    sum((plain(tokens(1, other)) + plain(tokens(2, other))) / world for other in range(world)).backward()
    torch.testing.assert_close(pannier.safe_get_full_grad(weight), plain.blocks[1].up.weight.grad, rtol=1e-4, atol=1e-6)
    pannier.safe_set_full_grad(weight, torch.full((48, 24), 0.125))
    assert torch.equal(pannier.safe_get_full_grad(weight), torch.full((48, 24), 0.125))
    engine.step()
    torch.testing.assert_close(pannier.safe_get_full_optimizer_state(weight, "exp_avg"), torch.full((48, 24), 0.0125))
    # A view taken in a forward, and a graph that is kept, are refused after the step.
    views: list[torch.Tensor] = []
    with model.blocks[1].up.register_forward_hook(lambda part, args, output: views.append(part.weight.detach())):
        lost = engine(tokens(1, rank))
        engine.backward(engine(tokens(1, rank)))
        engine.step()
    with pytest.raises(RuntimeError, match="partitioned"):
        views[0].sum()
    with pytest.raises(RuntimeError):
        lost.backward()
    # What is compiled has no hooks.
    model.norm.compile(backend="eager")
    with pytest.raises(pannier.UsageError, match="torch.compile"):
        engine(tokens(1, rank))
    model.norm._compiled_call_impl = None
    # What is loaded counts.
    model.load_state_dict(state)
    assert torch.equal(pannier.safe_get_full_fp32_param(weight), want["blocks.1.up.weight"])
    with pannier.zero.GatheredParameters(weight):
        engine.backward(engine(tokens(3, rank)))
        with pytest.raises(pannier.ConfigError, match="GatheredParameters"):
            engine.step()
    engine.step()
    return digest(list(weights(model).values()))


@pytest.mark.parametrize(("world", "home"), [(1, "cpu"), (2, "none"), (3, "cpu")])
def test_weights_are_read_right_or_refused(world: int, home: str) -> None:
    results = {ended.result for ended in ranks.run(__file__, "access", world, home)}
    assert len(results) == 1


class Kinds(torch.nn.Module):
    """Modules that read parameters in ways of their own, and a parameter that some ranks do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)  # Reads out_proj without calling it.
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8))
        self.listed = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(8)) for _ in range(3))
        self.pairs = torch.nn.ModuleList(Pair() for _ in range(3))
        self.row = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = self.encoder(self.conv(x.mT).mT)
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.recurrent(x)[0] + self.normed(x)
        for weight in self.listed:
            x = x * weight
        for pair in self.pairs:
            x = pair(x, x.detach(), way)["out"]
        return self.row(x.mean(1)).square().mean()


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(8, 8)
        self.right = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, way: int) -> dict[str, torch.Tensor]:
        return {"out": x + (self.left if way == 0 else self.right)(y).sin() + (self.left(x) if way == 2 else 0)}


@program
def kinds(rank: int, world: int, param_offload: str) -> Any:
    def batch(step: int, other: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(10 * step + other)), (step + other) % 3

    plain = Kinds()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3, weight_decay=0.01)
    model = Kinds()
    for module in (plain, model):
        module.row[2].eval()
    engine, _, _, _ = pannier.initialize(model=model, config=settings(param_offload=param_offload == "cpu", offload=True))
    for step in range(6):
        optimizer.zero_grad()
        sum(plain(*batch(step, other)) / world for other in range(world)).backward()
        optimizer.step()
        engine.backward(engine(*batch(step, rank)))
        engine.step()
        engine.eval()
        plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(engine(*batch(99, 0)), plain(*batch(99, 0)), rtol=1e-4, atol=1e-5)
        engine.train()
        plain.train()
        for module in (plain, model):
            module.row[2].eval()
    have = weights(model)
    for name, param in plain.named_parameters():
        assert (have[name] - param).abs().max() <= 5e-6, name
    return digest(list(have.values()))


@pytest.mark.parametrize(("world", "home"), [(1, "cpu"), (2, "none"), (3, "cpu")])
def test_every_kind_of_module(world: int, home: str) -> None:
    assert len({ended.result for ended in ranks.run(__file__, "kinds", world, home)}) == 1


class Fork(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
        self.right = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, way: list[str]) -> torch.Tensor:
        for name in way:
            x = getattr(self, name)[0](x)
        return x.sum()


@program
def branches(rank: int, world: int, kind: str) -> Any:
    """The first step is the same on all; then rank 1 takes another way, or calls a unit once more."""
    engine, _, _, _ = pannier.initialize(model=Fork(), config=settings(pannier={"collective_timeout": 5}))
    ways = {"swapped": ["right", "left"], "other": ["right"], "more": ["left", "left"]}
    other = ways.get(kind, ["left"])
    first = {"swapped": ["left", "right"]}.get(kind, ["left"])
    engine.backward(engine(torch.ones(1, 8), ["left", "right"]))
    engine.step()
    try:
        with torch.no_grad():  # One generates for longer, or looks at the weights alone.
            for _ in range(3 if kind == "longer" and rank == 0 else 0):
                engine(torch.ones(1, 8), first)
            if kind == "alone" and rank == 0:
                engine.module.state_dict()
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 8), other if rank == 1 else first))
            engine.step()
    except pannier.CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["swapped", "other", "more", "longer", "alone"])
def test_ranks_that_take_different_ways_are_told(kind: str) -> None:
    for ended in ranks.run(__file__, "branches", 2, kind):
        assert "left.0.weight" in ended.result or "right.0.weight" in ended.result, ended.result


if __name__ == "__main__":
    ranks.main(PROGRAMS)
