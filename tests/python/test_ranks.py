"""Training over ranks: the same weights as plain torch on the whole batch, the same bits on every rank, few bytes sent."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pannier
import ranks
from reference import DTYPES, OPTIMIZERS, Gradients, Zoo, config, gradients, plain_run

PROGRAMS: dict[str, ranks.Program] = {}
STEPS = 6


def program(body: ranks.Program) -> ranks.Program:
    PROGRAMS[body.__name__] = body
    return body


def given(world: int) -> Callable[[int, int, torch.dtype], Gradients]:
    """The gradients of micro-batches counted over ranks; on rank 1 one parameter is used every other step only."""

    def gradients_of(step: int, micro: int, dtype: torch.dtype) -> Gradients:
        result = gradients(step, micro, dtype)
        if micro % world == 1 and step % 2 == 1:
            del result["turned"]
        return result

    return gradients_of


def digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(
    rank: int,
    world: int,
    *,
    stage: int,
    offload: bool,
    dtype: str,
    gas: int,
    clipping: float,
    rule: str = "AdamW",
    bucket: int = 3000,
    nan_at: int = -1,
    zero: dict[str, Any] | None = None,
    **sections: Any,
) -> tuple[pannier.Engine, Zoo]:
    model = Zoo()
    settings = config(
        OPTIMIZERS[rule][0], stage=stage, offload=offload, dtype=dtype, gas=gas, clipping=clipping,
        zero={"reduce_bucket_size": bucket, **(zero or {})}, **sections,
    )  # fmt: skip
    engine, _, _, _ = pannier.initialize(model=model, config=settings)
    for step in range(STEPS):
        for micro in range(gas):
            grads = given(world)(step, micro * world + rank, DTYPES[dtype])
            if step == nan_at and rank == world - 1:
                grads["long"][4999] = math.nan
            engine.backward(engine(grads))
            engine.step()
    return engine, model


def masters(engine: pannier.Engine, model: Zoo) -> dict[str, torch.Tensor]:
    with pannier.zero.GatheredParameters([model.frozen]):
        frozen = model.frozen.detach().clone()
    return {
        name: frozen if name == "frozen" else pannier.safe_get_full_fp32_param(param)
        for name, param in model.named_parameters()
    }


@program
def matrix(rank: int, world: int, dtype: str) -> Any:
    """Every stage and home; returns what is wrong, and a digest of all weights."""
    wrong: list[str] = []
    everything = []
    # A loss divided by a power of two leaves a 16-bit gradient as exact as it was.
    for gas, clipping in ((1, 0.1), (4, 0.0), (4, 0.1)):
        expected = plain_run("AdamW", DTYPES[dtype], STEPS, gas * world, clipping, given(world))
        bits_of_stages = {}
        for stage in (0, 1, 2, 3):
            bits = set()
            homes = [(False, 3000), (True, 3000)] + [(False, 20), (True, 10**6)] * (gas == 1)
            for (offload, bucket), param_home in itertools.product(homes, ("none", "cpu")):
                if (stage == 0 and offload) or (stage < 3 and param_home == "cpu"):
                    continue
                cell = f"stage {stage}, offload {offload}, {param_home}, bucket {bucket}, gas {gas}, clipping {clipping}"
                zero = {"offload_param": {"device": param_home}, "stage3_param_persistence_threshold": 0}
                engine, model = train(
                    rank, world, stage=stage, offload=offload, dtype=dtype, gas=gas, clipping=clipping, bucket=bucket, zero=zero
                )
                have = masters(engine, model)
                for name, tensor in expected.items():
                    tolerance = 2e-6 if dtype == "fp32" else 2e-5
                    error = ((have[name].double() - tensor).abs() / tensor.abs().clamp(min=1)).max() if tensor.numel() else 0
                    if error > tolerance:
                        wrong.append(f"{cell}: {name} is off by {float(error)}")
                values = [*have.values(), *model.state_dict().values()]
                bits.add(digest(values))
                everything += values
                engine.destroy()
            if len(bits) != 1:
                wrong.append(f"stage {stage}, gas {gas}, clipping {clipping}: home or bucket size changed bits")
            bits_of_stages[stage] = bits
        if bits_of_stages[2] != bits_of_stages[3]:
            wrong.append(f"gas {gas}, clipping {clipping}: stage 3 changed bits of stage 2")
    return {"wrong": wrong, "digest": digest(everything)}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_those_of_the_whole_batch(world: int, dtype: str) -> None:
    results = [ended.result for ended in ranks.run(__file__, "matrix", world, dtype)]
    assert [result["wrong"] for result in results] == [[]] * world
    assert len({result["digest"] for result in results}) == 1, "ranks hold different bits"


@program
def optimizers(rank: int, world: int) -> Any:
    wrong = []
    for rule, offload in itertools.product(OPTIMIZERS, (False, True)):
        expected = plain_run(rule, torch.float32, STEPS, 2 * world, 0.1, given(world))
        engine, model = train(rank, world, stage=2, offload=offload, dtype="fp32", gas=2, clipping=0.1, rule=rule)
        have = masters(engine, model)
        for name, tensor in expected.items():
            if tensor.numel() and ((have[name].double() - tensor).abs() / tensor.abs().clamp(min=1)).max() > 2e-6:
                wrong.append(f"{rule}, offload {offload}: {name}")
        engine.destroy()
    return wrong


def test_every_optimizer() -> None:
    assert [ended.result for ended in ranks.run(__file__, "optimizers", 2)] == [[], []]


@program
def nonfinite(rank: int, world: int) -> Any:
    results = []
    for stage, offload, dtype in itertools.product((1, 2), (False, True), ("fp32", "bf16", "fp16")):
        engine, model = train(rank, world, stage=stage, offload=offload, dtype=dtype, gas=2, clipping=0.1, nan_at=3)
        results.append([engine.skipped_steps, digest(list(masters(engine, model).values()))])
        engine.destroy()
    return results


def test_a_nan_on_one_rank_skips_the_step_on_all() -> None:
    results = [ended.result for ended in ranks.run(__file__, "nonfinite", 3)]
    assert all(skipped == 1 for result in results for skipped, _ in result)
    assert results[0] == results[1] == results[2]


class Even(torch.nn.Module):
    """Parameters of whole blocks, so that shards of two or four ranks are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(4096 * 4)) for _ in range(3))

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.float().square().mean() for weight in self.weights]).sum()


@program
def wire(rank: int, world: int) -> Any:
    results = {}
    for stage, gas in itertools.product((1, 2), (1, 3)):
        torch.manual_seed(rank)
        engine, _, _, _ = pannier.initialize(
            model=Even(), config=config(OPTIMIZERS["AdamW"][0], stage=stage, dtype="bf16", gas=gas)
        )
        sent = []
        for _ in range(3):
            before = engine.wire_bytes()
            for _ in range(gas):
                engine.backward(engine())
                engine.step()
            after = engine.wire_bytes()
            sent.append({key: after[key] - before[key] for key in after})
        results[f"{stage} {gas}"] = sent
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_wire_bytes_are_those_of_the_theory(world: int) -> None:
    numel = 3 * 4 * 4096
    share = (world - 1) / world
    for ended in ranks.run(__file__, "wire", world):
        for cell, steps in ended.result.items():
            stage, gas = map(int, cell.split())
            # Stage 1 sends the fp32 sum of several micro-batches once, stage 2 each micro-batch in its own type.
            gradients = 2 * gas if stage == 2 or gas == 1 else 4
            for sent in steps:
                assert sent["gradients"] == share * numel * gradients, cell
                assert sent["parameters"] == share * numel * 2, cell
                assert sent["other"] == 0
                assert sent["total"] <= 1.06 * (sent["gradients"] + sent["parameters"]), "the vote is small beside them"


@program
def memory(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    numel = sum(param.numel() for param in model.parameters())
    engine, _, _, _ = pannier.initialize(
        model=model,
        config=config(OPTIMIZERS["AdamW"][0], stage=2, dtype="bf16", zero={"reduce_bucket_size": 512 * 513}),
    )
    owners = engine.memory_stats()["device"]["by_owner"]
    return {"states": owners["optimizer states"]["current"], "numel": numel}


@pytest.mark.parametrize("world", [2, 4])
def test_states_take_a_share_of_the_memory(world: int) -> None:
    for ended in ranks.run(__file__, "memory", world):
        result = ended.result
        assert abs(result["states"] - 10 * result["numel"] / world) <= 0.02 * 10 * result["numel"] + 2 * 10 * 512 * 513


@program
def initial(rank: int, world: int) -> Any:
    torch.manual_seed(rank)  # Each rank draws its own model.
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.fill_(float(rank))
    pannier.initialize(model=model, config=config(OPTIMIZERS["AdamW"][0], dtype="fp32"))
    return digest([*model.parameters(), *model.buffers()])


def test_ranks_start_from_the_model_of_rank_0() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    model[1].running_mean.fill_(0.0)
    expected = digest([*model.parameters(), *model.buffers()])
    assert [ended.result for ended in ranks.run(__file__, "initial", 3)] == [expected] * 3


@program
def access(rank: int, world: int) -> Any:
    """States and gradients are whole on every rank, and what is written counts."""
    engine, model = train(rank, world, stage=2, offload=True, dtype="bf16", gas=1, clipping=0.0)
    engine.backward(engine(given(world)(0, rank, torch.bfloat16)))
    grad = pannier.safe_get_full_grad(model.long)
    expected = sum(given(world)(0, other, torch.bfloat16)["long"] for other in range(world)) / world
    assert torch.allclose(grad, expected, rtol=1e-6, atol=1e-6)
    pannier.safe_set_full_fp32_param(model.long, torch.full((5001,), 0.5))
    pannier.safe_set_full_optimizer_state(model.long, torch.full((5001,), 0.25), "exp_avg")
    assert torch.equal(pannier.safe_get_full_fp32_param(model.long), torch.full((5001,), 0.5))
    assert torch.equal(pannier.safe_get_full_optimizer_state(model.long, "exp_avg"), torch.full((5001,), 0.25))
    assert pannier.safe_get_full_grad(model.unused) is None
    engine.step()
    return digest(list(masters(engine, model).values()))


def test_states_and_gradients_are_whole_on_every_rank() -> None:
    assert len({ended.result for ended in ranks.run(__file__, "access", 3)}) == 1


@program
def no_sync(rank: int, world: int) -> Any:
    """Backwards inside no_sync() send nothing; what they gave counts in the step, whether or not one outside follows."""
    wrong = []
    digests = []
    for outside, dtype in itertools.product((True, False), ("fp32", "bf16")):
        expected = plain_run("AdamW", DTYPES[dtype], STEPS, 4 * world, 0.1, given(world))
        model = Zoo()
        engine, _, _, _ = pannier.initialize(
            model=model, config=config(OPTIMIZERS["AdamW"][0], stage=1, dtype=dtype, clipping=0.1, zero={"reduce_bucket_size": 3000})
        )
        for step in range(STEPS):
            grads = [given(world)(step, micro * world + rank, DTYPES[dtype]) for micro in range(4)]
            inside = grads[: 3 if outside else 4]
            before = engine.wire_bytes()["total"]
            with engine.no_sync():
                for grad in inside:
                    engine.backward(engine(grad) / 4)
            if engine.wire_bytes()["total"] != before:
                wrong.append(f"{dtype}: bytes were sent inside no_sync()")
            for grad in grads[len(inside) :]:
                engine.backward(engine(grad) / 4)
            engine.step()
        have = masters(engine, model)
        for name, tensor in expected.items():
            tolerance = 2e-6 if dtype == "fp32" else 2e-5
            if tensor.numel() and ((have[name].double() - tensor).abs() / tensor.abs().clamp(min=1)).max() > tolerance:
                wrong.append(f"{dtype}, outside {outside}: {name}")
        digests.append(digest(list(have.values())))
        engine.destroy()
    return {"wrong": wrong, "digests": digests}


def test_no_sync_sends_nothing_and_loses_nothing() -> None:
    results = [ended.result for ended in ranks.run(__file__, "no_sync", 2)]
    assert [result["wrong"] for result in results] == [[], []]
    assert results[0]["digests"] == results[1]["digests"]


@program
def held(rank: int, world: int) -> Any:
    """Gradients that wait for the window's end are read as their sum over ranks, and what is written counts in their place."""
    grads = [[given(world)(0, micro * world + other, torch.float32) for other in range(world)] for micro in range(3)]
    mean = {name: sum(grad[name] for micro in grads for grad in micro if name in grad) / world for name in ("turned", "long")}
    results = []
    for waits, written in itertools.product(("accumulates", "no_sync", "the last"), (False, True)):
        model = Zoo()
        settings = config(
            OPTIMIZERS["AdamW"][0], stage=1, clipping=0.0, gas=4 if waits == "accumulates" else 1, zero={"reduce_bucket_size": 3000}
        )
        engine, _, _, _ = pannier.initialize(model=model, config=settings)
        with engine.no_sync() if waits == "no_sync" else contextlib.nullcontext():
            for micro in grads[:2]:
                engine.backward(engine(micro[rank]), scale_wrt_gas=False)
                if waits == "accumulates":
                    engine.step()
        with contextlib.nullcontext() if waits == "accumulates" else engine.no_sync():
            engine.backward(engine(grads[2][rank]), scale_wrt_gas=False)
            got = {name: pannier.safe_get_full_grad(getattr(model, name)) for name in mean}
            assert all(torch.allclose(got[name], mean[name], rtol=1e-6, atol=1e-6) for name in mean), waits
            assert pannier.safe_get_full_grad(model.unused) is None
            if written:
                pannier.safe_set_full_grad(model.long, -mean["long"])
                assert torch.equal(pannier.safe_get_full_grad(model.long), -mean["long"])
        if waits == "accumulates":
            engine.set_gradient_accumulation_boundary(True)
        engine.step()
        results.append(masters(engine, model))
        engine.destroy()
    for other in results[2:]:
        wrong = [name for name, tensor in results[0].items() if name != "long" and not torch.allclose(other[name], tensor)]
        assert not wrong
    assert all(torch.allclose(other["long"], results[i % 2]["long"]) for i, other in enumerate(results))
    return digest(list(results[1].values()))


def test_gradients_that_wait_can_be_read_and_replaced() -> None:
    assert len({ended.result for ended in ranks.run(__file__, "held", 2)}) == 1


@program
def summed(rank: int, world: int) -> Any:
    """The ranks' sum instead of their mean: gradients, their norm and the update."""
    for stage in range(4):
        model = Zoo()
        engine, _, _, _ = pannier.initialize(
            model=model, config=config(OPTIMIZERS["SGD"][0], stage=stage, clipping=0.0, gradient_allreduce_op="SUM")
        )
        before = masters(engine, model)
        engine.backward(engine({"long": torch.full((5001,), 1.0 + rank)}))
        assert pannier.safe_get_full_grad(model.long).unique().tolist() == [3.0], stage
        engine.step()
        assert math.isclose(engine.get_global_grad_norm(), 3.0 * math.sqrt(5001), rel_tol=1e-6)
        moved = before["long"] - masters(engine, model)["long"]
        lr, decay = (engine.optimizer.param_groups[0][key] for key in ("lr", "weight_decay"))
        assert torch.allclose(moved, lr * (3.0 + decay * before["long"]), rtol=1e-5, atol=1e-6), stage
        engine.destroy()
    return True


def test_gradients_can_be_summed_over_ranks() -> None:
    assert all(ended.result for ended in ranks.run(__file__, "summed", 2))


@program
def shared(rank: int, world: int) -> Any:
    """Activation checkpointing of both kinds, a module called twice, a tied head, two forwards before one backward."""
    from torch.utils.checkpoint import checkpoint

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.embed = torch.nn.Embedding(16, 24)
            self.block = torch.nn.Linear(24, 24)
            self.other = torch.nn.Linear(24, 24)

        def forward(self, tokens: torch.Tensor, kind: str) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in (self.block, self.other, self.block):
                x = x + (layer(x) if kind == "plain" else checkpoint(layer, x, use_reentrant=kind == "reentrant")).tanh()
            return torch.nn.functional.linear(x, self.embed.weight).logsumexp(-1).mean()

    def tokens(step: int, number: int) -> torch.Tensor:
        return torch.randint(16, (3, 5), generator=torch.Generator().manual_seed(100 * step + number))

    wrong = []
    for kind in ("plain", "reentrant", "not reentrant"):
        plain = Twice().double()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            sum(plain(tokens(step, n), "plain") + plain(tokens(step, n + 50), "plain") for n in range(world)).div(world).backward()
            optimizer.step()
        model = Twice()
        engine, _, _, _ = pannier.initialize(
            model=model,
            config=config({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}, offload=True, zero={"reduce_bucket_size": 300}),
        )
        for step in range(STEPS):
            first = engine(tokens(step, rank), kind)
            engine.backward(first + engine(tokens(step, rank + 50), kind))
            engine.step()
        for (name, param), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            if not torch.allclose(param.double(), want, rtol=0, atol=2e-6):
                wrong.append(f"{kind}: {name} is off by {(param.double() - want).abs().max().item()}")
        engine.destroy()
    return wrong


def test_shared_modules_and_checkpointing() -> None:
    assert [ended.result for ended in ranks.run(__file__, "shared", 3)] == [[], [], []]


# What can't be: an error on every rank that says who differs in what.


@program
def other_model(rank: int, world: int) -> Any:
    width = 8 if rank == 1 else 4
    try:
        pannier.initialize(model=torch.nn.Linear(4, width), config=config(OPTIMIZERS["AdamW"][0]))
    except pannier.ConfigError as error:
        return str(error)
    return "no error"


@program
def other_config(rank: int, world: int) -> Any:
    try:
        pannier.initialize(
            model=torch.nn.Linear(4, 4), config=config(OPTIMIZERS["AdamW"][0], clipping=0.5 if rank == 1 else 1.0)
        )
    except pannier.ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("name", "words"), [("other_model", ["rank 1", "[8, 4]", "[4, 4]"]), ("other_config", ["rank 1", "0.5", "1.0"])])
def test_ranks_that_differ_are_told_on_every_rank(name: str, words: list[str]) -> None:
    for ended in ranks.run(__file__, name, 3):
        for word in words:
            assert word in ended.result, ended.result


@program
def before_the_group(rank: int, world: int, kind: str) -> Any:
    """Rank 1 makes a mistake before ranks are connected, or does not come."""
    settings = config(OPTIMIZERS["AdamW"][0], pannier={"collective_timeout": 60 if kind == "mistake" else 3})
    if rank == 1 and kind == "mistake":
        settings["gradient_cliping"] = 1.0
    if rank == 1 and kind == "absent":
        pannier.init_distributed()
        sys.stdin.read()
    try:
        pannier.initialize(model=torch.nn.Linear(4, 4), config=settings)
    except (pannier.ConfigError, pannier.CollectiveError) as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def test_a_mistake_of_one_rank_ends_initialize_on_all() -> None:
    first, second, third = (ended.result for ended in ranks.run(__file__, "before_the_group", 3, "mistake"))
    assert second[0] == "ConfigError"
    for name, message in (first, third):
        assert name == "CollectiveError" and "rank" in message and "gradient_cliping" in message, message


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _ = ranks.run(__file__, "before_the_group", 2, "absent", killed={1})
    assert first.result == ["CollectiveError", "rank 1 has not come to initialize() within 3 s"]


@program
def differs(rank: int, world: int, kind: str) -> Any:
    """What only one rank does differently, outside of the configuration; returns the error."""
    model = torch.nn.Linear(80, 80)
    engine, optimizer, _, _ = pannier.initialize(
        model=model, config=config(OPTIMIZERS["AdamW"][0], pannier={"collective_timeout": 20})
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 80)).sum())
        engine.step()
    try:
        if kind == "lr" and rank == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        elif kind == "edit" and rank == 1:
            with torch.no_grad():
                model.bias[3] = 1.0
        elif kind == "value":
            pannier.safe_set_full_fp32_param(model.weight, torch.full((80, 80), float(rank)))
        elif kind == "key":
            pannier.safe_get_full_optimizer_state(model.weight, "exp_avg" if rank == 1 else "exp_avg_sq")
        engine.backward(engine(torch.ones(1, 80)).sum())
        engine.step()
    except (pannier.ConfigError, pannier.CollectiveError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lr", ["rank 1", "group 0: lr 0.5", "group 0: lr 0.01"]),
        ("edit", ["rank 1", "bias: 2 updates, edited"]),
        ("value", ["fp32_param of weight", "differ from rank 0's on 1 of 2 ranks"]),
        ("key", ["rank"]),
    ],
)
def test_what_one_rank_does_differently_is_an_error_on_all(kind: str, words: list[str]) -> None:
    for ended in ranks.run(__file__, "differs", 2, kind):
        for word in words:
            assert word in ended.result, ended.result


# Faults: every other rank ends with an error that names the rank, long before the time-out.


@program
def faults(rank: int, world: int, kind: str) -> Any:
    """Rank 1 is killed in the middle of a step, fails in a backward, or stays away; the others are told."""
    model = torch.nn.Linear(64, 64)
    timeout = 5 if kind == "late" else 60
    engine, _, _, _ = pannier.initialize(
        model=model,
        config=config(OPTIMIZERS["AdamW"][0], zero={"reduce_bucket_size": 64}, pannier={"collective_timeout": timeout}),
    )
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    before = digest(list(model.parameters()))

    def misbehave(grad: torch.Tensor) -> torch.Tensor:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("no such gradient")

    if rank == 1 and kind == "late":
        sys.stdin.read()  # Until the others have gone, which is until this process is killed.
    if rank == 1:
        model.weight.register_hook(misbehave)
    errors = []
    for _ in range(2):  # The group is dead for good.
        try:
            engine.backward(engine(torch.ones(1, 64)).sum())
            engine.step()
        except (pannier.CollectiveError, ArithmeticError) as error:
            errors.append([type(error).__name__, str(error)])
    return {"errors": errors, "unchanged": before == digest(list(model.parameters()))}


@pytest.mark.parametrize(
    ("kind", "words"),
    [("killed", "rank 1 died"), ("fails", "rank 1 failed: its backward failed: ArithmeticError: no such gradient"), ("late", "rank 1")],
)
def test_ranks_learn_of_one_that_cannot_go_on(kind: str, words: str) -> None:
    for rank, ended in enumerate(ranks.run(__file__, "faults", 3, kind, killed={1} if kind == "late" else set())):
        if rank == 1 and kind != "fails":
            continue
        assert ended.result["unchanged"]
        assert len(ended.result["errors"]) == 2
        for number, (name, message) in enumerate(ended.result["errors"]):
            if rank == 1 and number == 0:
                assert name == "ArithmeticError"
            else:
                assert name == "CollectiveError" and words in message, message


@program
def groups_left(rank: int, world: int) -> list[int]:
    """Process groups of torch's after engines that ended in each way."""
    pannier.init_distributed()
    groups = torch.distributed.distributed_c10d._world.pg_map
    counts = []
    for how in ("destroyed", "forgotten", "refused"):
        budget = {"host_memory": "1KiB"} if how == "refused" else {}
        settings = config(OPTIMIZERS["AdamW"][0], stage=2, offload=True, pannier={"collective_timeout": 30, **budget})
        try:
            engine, *_ = pannier.initialize(model=Zoo(), config=settings)
            if how == "destroyed":
                engine.destroy()
            del engine
        except torch.OutOfMemoryError:
            pass
        gc.collect()
        counts.append(len(groups))
    return counts


def test_groups_of_engines_end_with_them() -> None:
    assert [ended.result for ended in ranks.run(__file__, "groups_left", 2)] == [[1, 1, 1]] * 2


if __name__ == "__main__":
    ranks.main(PROGRAMS)
