"""Optimizer states that rest on the host and are updated on the device: the same bits, within the same memory."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pannier
from reference import DTYPES, OPTIMIZERS, config
from test_parity import same_bits

Act = Callable[[pannier.Engine, int], None]
WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Tower(nn.Module):
    """Rows of blocks between modules that stand alone, one of them tied to nothing and seldom used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, all_of_it: bool = True) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if all_of_it:
            x = x + self.seldom(x)
        return self.last(x * self.scale)


def make(
    share: float | None,
    rule: str = "AdamW",
    dtype: str = "bf16",
    gas: int = 1,
    clipping: float = 0.0,
    bucket: float = 700,
    model: nn.Module | None = None,
    **pannier_keys: Any,
) -> pannier.Engine:
    """An engine; `share` None: without offload."""
    if share is not None:
        pannier_keys["streamed_share"] = share
    settings = config(
        OPTIMIZERS[rule][0],
        offload=share is not None,
        dtype=dtype,
        gas=gas,
        clipping=clipping,
        zero={"reduce_bucket_size": bucket},
        pannier=pannier_keys,
    )
    return pannier.initialize(model=Tower() if model is None else model, config=settings)[0]


def loss_of(engine: pannier.Engine, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    dtype = next(engine.module.parameters()).dtype
    x = torch.randn(5, 8, generator=draw).to(dtype)
    y = torch.randn(5, 3, generator=draw)
    return (engine(x, seed % 3 != 1).float() - y).square().mean()


def contents(engine: pannier.Engine) -> dict[str, torch.Tensor]:
    """Parameters, masters and states by name."""
    result = {}
    keys = [key for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum") if key in engine._core.state_keys()]
    for name, param in engine.module.named_parameters():
        result[f"param.{name}"] = param.detach().clone()
        result[f"master.{name}"] = pannier.safe_get_full_fp32_param(param)
        for key in keys:
            result[f"{key}.{name}"] = pannier.safe_get_full_optimizer_state(param, key)
    return result


def train(engine: pannier.Engine, steps: int, act: Act | None = None, first: int = 0) -> None:
    gas = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        for micro in range(gas):
            engine.backward(loss_of(engine, 100 * step + micro))
            engine.step()
        if act is not None:
            act(engine, step)


def trained(share: float | None, steps: int = 20, act: Act | None = None, **options: Any) -> dict[str, torch.Tensor]:
    engine = make(share, **options)
    train(engine, steps, act)
    result = contents(engine)
    result["norm"] = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
    engine.destroy()
    return result


@pytest.mark.parametrize("gas", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["AdamW", "SGD", "Nesterov", "Adagrad", "Lion"])
def test_every_share_gives_the_bits_of_no_offload(rule: str, dtype: str, gas: int) -> None:
    for clipping in (0.0, 0.1):
        options: dict[str, Any] = {"rule": rule, "dtype": dtype, "gas": gas, "clipping": clipping}
        want = trained(None, **options)
        for share in (0.0, 0.5, 1.0):
            assert same_bits(want, trained(share, **options)) == [], (share, clipping)


@pytest.mark.parametrize("bucket", [1, 3000, 1e9])
def test_bucket_sizes_do_not_change_a_bit(bucket: float) -> None:
    want = trained(None, clipping=0.1)
    for share in (0.5, 1.0):
        assert same_bits(want, trained(share, clipping=0.1, bucket=bucket)) == [], share


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_delays_do_not_change_a_bit(dtype: str, seed: int) -> None:
    for gas in (1, 4):
        want = trained(None, steps=8, dtype=dtype, gas=gas, clipping=0.1)
        for share in (0.0, 0.5, 1.0):
            got = trained(share, steps=8, dtype=dtype, gas=gas, clipping=0.1, stress_seed=seed)
            assert same_bits(want, got) == [], (gas, share)


def edit(engine: pannier.Engine, step: int) -> None:
    """Writes into parameters between steps in each of the ways that count."""
    params = dict(engine.module.named_parameters())
    with torch.no_grad():
        if step == 2:
            params["first.weight"].zero_()
        if step == 3:
            params["blocks.1.up.weight"].data.mul_(0.5)
            engine.parameters_changed()
        if step == 5:
            params["scale"].data = torch.full_like(params["scale"], 0.25)
        if step == 6:
            params["blocks.3.down.bias"][:3].add_(1)


def look(engine: pannier.Engine, step: int) -> None:
    """Reads and writes states between steps."""
    params = dict(engine.module.named_parameters())
    moment = pannier.safe_get_full_optimizer_state(params["blocks.0.up.weight"], "exp_avg")
    if step % 3 == 1:
        pannier.safe_set_full_optimizer_state(params["blocks.0.up.weight"], moment * 0.5, "exp_avg")
        master = pannier.safe_get_full_fp32_param(params["last.weight"])
        pannier.safe_set_full_fp32_param(params["last.weight"], master + 0.125)
    if step % 3 == 2:
        state = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(state)


@pytest.mark.parametrize("act", [edit, look])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edits_and_looks_count_the_same_on_every_way(act: Act, dtype: str) -> None:
    want = trained(None, steps=9, act=act, dtype=dtype)
    for share in (0.0, 0.5, 1.0):
        for seed in (0, 1):
            got = trained(share, steps=9, act=act, dtype=dtype, stress_seed=seed)
            assert same_bits(want, got) == [], (share, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_are_read_and_written_between_backward_and_step(dtype: str) -> None:
    results = []
    for share in (None, 0.5, 1.0):
        engine = make(share, dtype=dtype)
        for step in range(6):
            engine.backward(loss_of(engine, step))
            param = engine.module.blocks[0].up.weight
            moment = pannier.safe_get_full_optimizer_state(param, "exp_avg_sq")
            pannier.safe_set_full_optimizer_state(param, moment + 1e-3, "exp_avg_sq")
            with torch.no_grad():
                engine.module.blocks[2].up.weight.mul_(0.75)
            engine.step()
        results.append(contents(engine))
        engine.destroy()
    assert same_bits(results[0], results[1]) == [] and same_bits(results[0], results[2]) == []


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_is_skipped_changes_nothing(dtype: str, seed: int) -> None:
    for share in (0.5, 1.0):
        engine = make(share, dtype=dtype, stress_seed=seed)
        train(engine, 3)
        before = contents(engine)
        loss = loss_of(engine, 3)
        engine.backward(loss + engine.module.blocks[1].up.weight.float().sum() * float("nan"))
        engine.step()
        assert engine.skipped_steps == 1
        assert same_bits(before, contents(engine)) == []
        train(engine, 3, first=4)
        assert engine.global_steps == 7
        engine.destroy()


@pytest.mark.parametrize("seed", [0, 2])
def test_a_backward_that_fails_in_the_middle_leaves_no_trace(seed: int) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("boom")

    def failing(engine: pannier.Engine, step: int) -> None:
        if step % 2 == 1:
            handle = engine.module.blocks[1].register_forward_hook(lambda module, args, output: Fails.apply(output))
            loss = loss_of(engine, step)
            handle.remove()
            with pytest.raises(RuntimeError, match="boom"):
                engine.backward(loss)

    want = trained(None, steps=8, clipping=0.1)
    for share in (None, 0.5, 1.0):
        assert same_bits(want, trained(share, steps=8, clipping=0.1, act=failing, stress_seed=seed)) == []


def test_destroy_at_any_moment_keeps_parameters_and_lets_go() -> None:
    def moments(engine: pannier.Engine):
        yield
        loss = loss_of(engine, 50)
        yield
        engine.backward(loss)
        yield
        engine.step()
        yield

    for seed in (0, 1):
        for moment in range(4):
            engine = make(1.0, stress_seed=seed)
            train(engine, 2)
            at = moments(engine)
            for _ in range(moment + 1):
                next(at)
            before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
            engine.destroy()
            assert same_bits(before, dict(engine.module.named_parameters())) == []
            engine.module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
            second = make(1.0, model=engine.module)
            train(second, 2)
            second.destroy()


def test_destroy_inside_forward_and_backward() -> None:
    for where in ("forward", "backward"):
        engine = make(1.0, stress_seed=1)
        train(engine, 2)
        block = engine.module.blocks[2]
        if where == "forward":
            handle = block.register_forward_hook(lambda *_, engine=engine: engine.destroy())
        else:
            handle = block.register_full_backward_hook(lambda *_, engine=engine: engine.destroy())
        with pytest.raises((RuntimeError, ValueError), match="destroyed|closed"):
            engine.backward(loss_of(engine, 9))
        handle.remove()
        assert engine.is_closed
        train(make(1.0, model=engine.module), 2)


def test_a_forked_child_runs_the_model_and_leaves_the_rest_alone() -> None:
    engine = make(1.0)
    train(engine, 3)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # Torch's own threads are not there after a fork.
            engine.module(torch.ones(2, 8, dtype=torch.bfloat16))
            try:
                engine(torch.ones(2, 8, dtype=torch.bfloat16))
            except pannier.ConfigError:
                status = 0
            engine.destroy()
            engine.module(torch.ones(2, 8, dtype=torch.bfloat16))
            del engine
            gc.collect()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    train(engine, 3, first=3)
    assert same_bits(trained(None, steps=6), {**contents(engine), "norm": torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)}) == []
    engine.destroy()


def test_engines_at_once_do_not_touch_each_other() -> None:
    want = trained(None, steps=6)
    del want["norm"]
    engines = [make(share, stress_seed=seed) for share, seed in ((0.5, 1), (1.0, 2), (1.0, 0), (0.0, 3))]
    for step in range(6):
        losses = [loss_of(engine, 100 * step) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in engines:
            engine.step()
    for engine in engines:
        assert same_bits(want, contents(engine)) == []
        engine.destroy()


def test_modules_with_ticks_copy_and_pickle() -> None:
    engine = make(1.0)
    train(engine, 2)
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    copies = [copy.deepcopy(engine.module), torch.load(file, weights_only=False)]
    before = engine.module(x)
    for other in copies:
        assert torch.equal(other(x), before)
    second = make(1.0, model=copies[0])
    hooks = [hook for module in copies[0].modules() for hook in module._forward_pre_hooks.values()]
    units = [module for module in copies[0].modules() if module._forward_pre_hooks]
    assert len(hooks) == len(units) == 8  # first, four blocks, the root with its scale, seldom, last
    train(second, 2)
    second.destroy()
    engine.destroy()
    for module in (*engine.module.modules(), *copies[0].modules()):
        assert not module._forward_pre_hooks


def test_an_engine_that_goes_takes_its_hooks_along() -> None:
    engine = make(1.0)
    module = engine.module
    train(engine, 2)
    del engine
    gc.collect()
    assert not any(part._forward_pre_hooks for part in module.modules())
    without = make(None)
    assert not any(part._forward_pre_hooks for part in without.module.modules())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_recomputed_units_tick_again_and_change_nothing(checkpointing: bool) -> None:
    class Checkpointed(Tower):
        def forward(self, x: torch.Tensor, all_of_it: bool = True) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=checkpointing)
            return self.last((x + self.seldom(x)) * self.scale)

    want = trained(None, steps=5, model=Checkpointed())
    assert same_bits(want, trained(1.0, steps=5, model=Checkpointed(), stress_seed=1)) == []


def test_a_compiled_forward_is_one_graph_and_trains_the_same() -> None:
    results = []
    for share in (None, 1.0):
        engine = make(share, stress_seed=1)
        compiled = torch.compile(engine, backend="eager", fullgraph=True)
        for step in range(4):
            engine.backward(compiled(torch.full((2, 8), step + 1.0, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        results.append(contents(engine))
        engine.destroy()
        torch._dynamo.reset()
    assert same_bits(*results) == []


class Wide(nn.Module):
    """Blocks of some size, and a loss that takes more memory for a moment than all of them keep."""

    def __init__(self, width: int = 128, classes: int = 8192) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)])
        self.classes = classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        logits = x.mean(1, keepdim=True).expand(-1, self.classes) * 1.5
        return logits.logsumexp(1).mean() + x.square().mean()


BUCKET = 128 * 129
BUCKET_STATES = 8 * BUCKET


def peak(share: float | None, budget: int | None = None, steps: int = 6, **pannier_keys: Any) -> tuple[int, int]:
    """The device's peak above what was in use before, and that of streamed states."""
    gc.collect()
    before = json.loads(torch.ops.pannier.device_memory())["current"]
    if budget is not None:
        pannier_keys["device_memory"] = before + budget
    engine = make(share, dtype="fp32", bucket=BUCKET, model=Wide(), **pannier_keys)
    engine.reset_peak_memory()
    for step in range(steps):
        x = torch.full((96, 128), 1.0 + step)
        engine.backward(engine(x))
        engine.step()
    stats = engine.memory_stats()["device"]
    engine.destroy()
    return stats["peak"] - before, stats["by_owner"]["streamed states"]["peak"]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_peak_does_not_rise_by_more_than_a_bucket(seed: int) -> None:
    host, nothing = peak(0.0, stress_seed=seed)
    assert nothing == 0
    streamed, most = peak(1.0, stress_seed=seed)
    assert most > 2 * BUCKET_STATES, "states did not use the room that there is"
    assert streamed <= host + BUCKET_STATES


@pytest.mark.parametrize("seed", [0, 1])
def test_a_roomy_budget_keeps_states_up_and_a_tight_one_holds(seed: int) -> None:
    host, _ = peak(0.0)
    _, most = peak(1.0, budget=host + 14 * BUCKET_STATES, stress_seed=seed)
    assert most >= 11 * BUCKET_STATES
    for extra in (BUCKET_STATES, 2 * BUCKET_STATES):
        used, most = peak(1.0, budget=host + extra, stress_seed=seed)
        assert used <= host + extra and most >= BUCKET_STATES


def test_a_budget_with_room_for_one_bucket_trains_to_the_same_bits() -> None:
    def run(share: float | None, budget: int | None = None, **pannier_keys: Any) -> dict[str, torch.Tensor]:
        gc.collect()
        if budget is not None:
            pannier_keys["device_memory"] = json.loads(torch.ops.pannier.device_memory())["current"] + budget
        engine = make(share, dtype="fp32", bucket=BUCKET, model=Wide(classes=1), **pannier_keys)
        for step in range(5):
            engine.backward(engine(torch.full((1, 128), 1.0 + step)))
            engine.step()
        params = dict(engine.module.named_parameters())
        engine.destroy()
        return {name: param.detach().clone() for name, param in params.items()}

    want = run(None)
    # Parameters, gradients, one bucket's states, and some room for the activations.
    budget = 12 * 8 * BUCKET + BUCKET_STATES + 2**16
    for seed in (0, 1, 2):
        assert same_bits(want, run(1.0, budget=budget, stress_seed=seed)) == []
