"""`"overlap_step"`: the host updates beside the next forward, to the same bits, and nobody ever reads an old value."""

from __future__ import annotations

import copy
import gc
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pannier
from pannier import overlap
from reference import DTYPES, OPTIMIZERS, Zoo, config, gradients
from test_parity import same_bits
from test_streamed import WIDTH, Block, Tower, edit, look, loss_of, make, train, trained
from test_streamed import contents as contents_in_place

MESSAGE = "was read while the engine was still updating it"
X = torch.ones(2, 8, dtype=torch.bfloat16)


def overlapped(share: float = 0.0, seed: int = 1, **options: Any) -> pannier.Engine:
    return make(share, overlap_step=True, stress_seed=seed, **options)


def contents(engine: pannier.Engine) -> dict[str, torch.Tensor]:
    engine.synchronize()
    return contents_in_place(engine)


def trained_overlapped(
    share: float = 0.0, steps: int = 20, act: Callable[[pannier.Engine, int], None] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    engine = overlapped(share, **options)
    train(engine, steps, act)
    result = contents(engine)
    result["norm"] = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
    engine.destroy()
    return result


def stepped(**options: Any) -> pannier.Engine:
    """An engine whose last call was a step that updated."""
    engine = overlapped(**options)
    train(engine, 2)
    return engine


def is_released(param: torch.Tensor) -> bool:
    try:
        param.data_ptr()
    except RuntimeError as error:
        assert MESSAGE in str(error)
        return True
    return False


@pytest.mark.parametrize("gas", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["AdamW", "SGD", "Nesterov", "Adagrad", "Lion"])
def test_overlap_gives_the_bits_of_no_offload(rule: str, dtype: str, gas: int) -> None:
    for clipping in (0.0, 0.1):
        options: dict[str, Any] = {"rule": rule, "dtype": dtype, "gas": gas, "clipping": clipping, "steps": 10}
        want = trained(None, **options)
        for share, seed in ((0.0, 0), (0.0, 1), (0.5, 2)):
            got = trained_overlapped(share, seed=seed, **options)
            assert same_bits(want, got) == [], (share, seed, clipping)


@pytest.mark.parametrize("bucket", [1, 3000, 1e9])
def test_bucket_sizes_do_not_change_a_bit(bucket: float) -> None:
    want = trained(None, clipping=0.1)
    for share in (0.0, 0.5):
        assert same_bits(want, trained_overlapped(share, clipping=0.1, bucket=bucket)) == [], share


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_parameter(dtype: str) -> None:
    results = []
    for keys in ({}, {"overlap_step": True, "stress_seed": 5}):
        model = Zoo()
        settings = config(
            OPTIMIZERS["AdamW"][0], offload=True, dtype=dtype, zero={"reduce_bucket_size": 40}, pannier=keys
        )
        engine = pannier.initialize(model=model, config=settings)[0]
        for step in range(8):
            engine.backward(engine(gradients(step, 0, DTYPES[dtype])))
            engine.step()
        engine.synchronize()
        results.append({name: param.detach().clone() for name, param in model.named_parameters()})
        engine.destroy()
    assert same_bits(*results) == []


@pytest.mark.parametrize("act", [edit, look])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edits_and_looks_count_the_same(act: Callable[[pannier.Engine, int], None], dtype: str) -> None:
    def settled(engine: pannier.Engine, step: int) -> None:
        if act is edit:
            engine.synchronize()
        act(engine, step)

    want = trained(None, steps=9, act=act, dtype=dtype)
    for seed in (0, 1, 2):
        assert same_bits(want, trained_overlapped(steps=9, act=settled, dtype=dtype, seed=seed)) == [], seed


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda p: p + 1,
    "item": lambda p: p.sum().item(),
    "print": str,
    "data_ptr": lambda p: p.data_ptr(),
    "matmul": lambda p: torch.ones(1, p.shape[0], dtype=p.dtype) @ p,
    "detach": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "view": lambda p: p.view(-1).sum(),
    "turned": lambda p: p.t().contiguous(),
    "index": lambda p: p[0, 0].item(),
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().float().numpy(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "equal": lambda p: torch.equal(p, p.detach()),
    "deepcopy": copy.deepcopy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "foreach": lambda p: torch._foreach_norm([p]),
    "cat": lambda p: torch.cat([p, p]),
    "to": lambda p: p.to(torch.float64),
    "write": lambda p: p.data.zero_(),
    "copy": lambda p: p.data.copy_(torch.ones(p.shape)),
    "flat": lambda p: nn.utils.parameters_to_vector([p]),
    "average": lambda p: p.detach().float().lerp(torch.ones(p.shape), 0.5),
    "shared": lambda p: p.share_memory_(),
}


@pytest.mark.parametrize("read", READS)
def test_reading_a_parameter_right_after_step_raises(read: str) -> None:
    engine = stepped()
    param = engine.module.blocks[1].up.weight
    with pytest.raises(RuntimeError, match=MESSAGE) as raised:
        READS[read](param)
    assert "blocks.1.up.weight" in str(raised.value) and "synchronize" in str(raised.value)
    train(engine, 2, first=2)
    want = trained(None, steps=4)
    del want["norm"]
    assert same_bits(want, contents(engine)) == []
    engine.destroy()


def test_shape_and_identity_need_no_wait() -> None:
    engine = stepped()
    param = engine.module.blocks[1].up.weight
    assert param.shape == (2 * WIDTH, WIDTH) and param.t().shape == (WIDTH, 2 * WIDTH)
    assert param.dtype == torch.bfloat16 and param.requires_grad and param.is_leaf and param.numel() == 2 * WIDTH**2
    assert sum(p.numel() for p in engine.module.parameters()) > 0
    engine.zero_grad()
    assert is_released(param)
    engine.destroy()


def test_a_view_of_a_released_parameter_never_shows_an_old_value() -> None:
    engine = stepped()
    view = engine.module.blocks[1].up.weight.detach()
    engine.synchronize()
    with pytest.raises(RuntimeError, match=MESSAGE):
        view.sum()
    engine.destroy()


WAITS: dict[str, Callable[[pannier.Engine], Any]] = {
    "synchronize": lambda engine: engine.synchronize(),
    "eval": lambda engine: engine.eval(),
    "state_dict": lambda engine: {k: v.clone() for k, v in engine.module.state_dict().items()},
    "engine state_dict": lambda engine: {k: v.clone() for k, v in engine.state_dict().items()},
    "part's state_dict": lambda engine: {k: v.clone() for k, v in engine.module.blocks[0].state_dict().items()},
    "module_state_dict": lambda engine: {k: v.clone() for k, v in engine.module_state_dict().items()},
    "load_state_dict": lambda engine: engine.module.load_state_dict(
        {k: torch.zeros_like(v) for k, v in engine.module.named_parameters()}
    ),
    "part's load_state_dict": lambda engine: engine.module.last.load_state_dict(
        {k: torch.zeros_like(v) for k, v in engine.module.last.named_parameters()}
    ),
    "load_module_state_dict": lambda engine: engine.load_module_state_dict(
        {"module": {k: torch.zeros(v.shape) for k, v in engine.module.named_parameters()}},
        custom_load_fn=lambda src, dst: [p.data.copy_(src[name]) for name, p in dst.named_parameters()],
    ),
    "parameters_changed": lambda engine: engine.parameters_changed(),
    "master": lambda engine: pannier.safe_get_full_fp32_param(engine.module.scale),
    "state": lambda engine: pannier.safe_get_full_optimizer_state(engine.module.scale, "exp_avg"),
    "optimizer.state_dict": lambda engine: engine.optimizer.state_dict(),
    "gathered": lambda engine: pannier.zero.GatheredParameters(engine.module.scale).__enter__(),
    "gradient": lambda engine: pannier.safe_get_full_grad(engine.module.scale),
    "destroy": lambda engine: engine.destroy(),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_by_itself(what: str) -> None:
    engine = stepped()
    assert is_released(engine.module.blocks[1].up.weight)
    WAITS[what](engine)
    assert not any(is_released(param) for param in engine.module.parameters())
    engine.destroy()


def test_units_wait_for_their_own_alone() -> None:
    engine = overlapped(bucket=1)
    model = engine.module
    seen: list[tuple[bool, ...]] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_: seen.append(tuple(is_released(b.up.weight) for b in model.blocks)))
    train(engine, 2)
    seen.clear()
    loss_of(engine, 0)
    assert seen == [tuple(other > index for other in range(4)) for index in range(4)]
    engine.destroy()


def test_which_unit_reads_what() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 8)
            self.attention = nn.MultiheadAttention(8, 2)
            self.row = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)])
            self.script = torch.jit.script(nn.Linear(8, 8))
            self.head = nn.Linear(8, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Model()
    params = dict(model.named_parameters())
    names = list(params)
    found = [[names[i] for i in unit] for unit in overlap.parameters_of_units(model, list(params.values()))]
    assert found[0] == ["script.weight", "script.bias"]
    assert found[1] == ["embed.weight"]
    assert found[2] == [name for name in names if name.startswith("attention")]  # Its out_proj too, which nobody calls.
    assert found[-1] == ["embed.weight"]
    assert ["row.0.0.weight", "row.0.0.bias"] in found and ["row.1.weight", "row.1.bias"] in found


class Attends(nn.Module):
    """Reads a weight of a module that is never called, and one weight in two places, one of them without a module."""

    def __init__(self, in_row: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(8, 16)
        attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.blocks = nn.ModuleList([attention, nn.Linear(16, 16)] if in_row else [nn.Linear(16, 16)])
        self.attention = None if in_row else attention
        self.uncalled = nn.Linear(16, 16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, all_of_it: bool = True) -> torch.Tensor:
        h = self.embed(x)
        h = h + (self.blocks[0] if self.attention is None else self.attention)(h, h, h)[0]
        h = self.blocks[-1](h)
        h = torch.nn.functional.linear(h, self.uncalled.weight, self.uncalled.bias)
        return torch.nn.functional.linear(h, self.embed.weight) + self.head(h)


@pytest.mark.parametrize("in_row", [True, False])
@pytest.mark.parametrize("bucket", [1, 400, 1e9])
def test_weights_of_modules_that_nobody_calls(in_row: bool, bucket: float) -> None:
    results = []
    for share in (None, 0.0):
        engine = make(share, bucket=bucket, model=Attends(in_row), overlap_step=share is not None, stress_seed=1)
        for step in range(6):
            x = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.synchronize()
        results.append({name: param.detach().clone() for name, param in engine.module.named_parameters()})
        engine.destroy()
    assert same_bits(*results) == []


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.t(),
    "storage": lambda p: p.untyped_storage(),
    "numpy": lambda p: p.detach().view(torch.int16).numpy(),
    "graph": lambda p: nn.functional.linear(torch.ones(1, WIDTH, dtype=p.dtype, requires_grad=True), p),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_what_something_else_refers_to_is_waited_for(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    engine = stepped(bucket=1)
    engine.synchronize()
    param = engine.module.blocks[1].up.weight
    alias = ALIASES[kind](param)
    capfd.readouterr()
    train(engine, 1, first=2)
    assert not is_released(param) and is_released(engine.module.blocks[2].up.weight)
    now = param.detach().clone()
    if kind in ("detach", "data"):
        assert torch.equal(alias, now)
    train(engine, 1, first=3)
    if kind in ("detach", "data"):
        assert torch.equal(alias, param) and not torch.equal(alias, now)
    assert capfd.readouterr().err.count("refers to the memory of parameter blocks.1.up.weight") == 1
    del alias
    train(engine, 2, first=4)
    assert is_released(param)
    want = trained(None, steps=6)
    del want["norm"]
    assert same_bits(want, contents(engine)) == []
    engine.destroy()


def test_a_state_dict_that_is_kept_follows_the_updates() -> None:
    engine = stepped()
    kept = engine.module.state_dict()
    train(engine, 1, first=2)
    assert not any(is_released(param) for param in engine.module.parameters())
    assert same_bits(kept, dict(engine.module.named_parameters())) == []
    engine.destroy()


def replace_same(param: torch.Tensor) -> None:
    param.data = torch.zeros(param.shape, dtype=param.dtype)


def replace_shape(param: torch.Tensor) -> None:
    param.data = torch.zeros(3, dtype=param.dtype)


def replace_type(param: torch.Tensor) -> None:
    param.data = torch.zeros(param.shape, dtype=torch.float32)


@pytest.mark.parametrize("replace", [replace_same, replace_shape, replace_type])
@pytest.mark.parametrize("seen_by", ["forward", "backward", "synchronize"])
def test_data_replaced_while_released_is_an_error(replace: Callable[[torch.Tensor], None], seen_by: str) -> None:
    engine = stepped()
    param = engine.module.blocks[1].up.weight
    replace(param)
    with pytest.raises(pannier.ConfigError, match="blocks.1.up.weight was replaced while"):
        if seen_by == "forward":
            engine(X)
        elif seen_by == "backward":
            engine.backward(torch.ones(1, requires_grad=True).sum())
        else:
            engine.synchronize()
    # It has the update's values.
    engine.synchronize()
    assert param.shape == (2 * WIDTH, WIDTH) and param.dtype == torch.bfloat16 and bool(param.any())
    master = pannier.safe_get_full_fp32_param(param)
    assert torch.equal(master.bfloat16(), param)
    train(engine, 2, first=3)
    engine.destroy()


def test_an_exception_in_forward_between() -> None:
    def failing(engine: pannier.Engine, step: int) -> None:
        handle = engine.module.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine(X)
        handle.remove()

    want = trained(None, steps=6)
    assert same_bits(want, trained_overlapped(steps=6, act=failing)) == []


def test_a_forward_that_no_backward_follows() -> None:
    def looking(engine: pannier.Engine, step: int) -> None:
        with torch.no_grad():
            engine(X)
            engine.module(X)

    want = trained(None, steps=6)
    assert same_bits(want, trained_overlapped(steps=6, act=looking)) == []


@pytest.mark.parametrize("through_engine", [True, False])
def test_switching_between_training_and_evaluation(through_engine: bool) -> None:
    def evaluate(engine: pannier.Engine, step: int) -> None:
        module = engine if through_engine else engine.module
        module.eval()
        with torch.no_grad():
            module(X)
        module.train()

    want = trained(None, steps=6)
    assert same_bits(want, trained_overlapped(steps=6, act=evaluate)) == []


def test_the_short_cuts_of_an_evaluation_find_everything() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    engine = overlapped(model=Encoder(), dtype="fp32", bucket=1)
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        engine.train()
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.module.eval()
        with torch.no_grad():
            engine(x)
    engine.destroy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_is_skipped_releases_nothing(dtype: str) -> None:
    engine = stepped(dtype=dtype)
    before = contents(engine)
    engine.backward(loss_of(engine, 3) + engine.module.blocks[1].up.weight.float().sum() * float("nan"))
    engine.step()
    assert engine.skipped_steps == 1
    assert not any(is_released(param) for param in engine.module.parameters())
    assert same_bits(before, contents(engine)) == []
    train(engine, 2, first=4)
    engine.destroy()


def test_an_old_graph_is_refused_as_torch_refuses_it() -> None:
    engine = overlapped()
    loss = loss_of(engine, 0)
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)
    engine.destroy()


def test_destroy_right_after_step_leaves_the_updated_values() -> None:
    want = {key: value for key, value in trained(None, steps=3).items() if key.startswith("param.")}
    for seed in range(1, 6):
        engine = overlapped(seed=seed)
        module = engine.module
        train(engine, 3)
        if seed % 2 == 0:
            engine.destroy()
        del engine
        gc.collect()
        assert same_bits(want, {f"param.{name}": p.detach() for name, p in module.named_parameters()}) == []
        assert not any(p._state_dict_pre_hooks or p._load_state_dict_pre_hooks for p in module.modules())
        second = overlapped(model=module)
        train(second, 1)
        second.destroy()


def test_engines_at_once_do_not_touch_each_other() -> None:
    want = trained(None, steps=6)
    del want["norm"]
    engines = [overlapped(share, seed) for share, seed in ((0.0, 1), (0.5, 2), (0.0, 0))]
    for step in range(6):
        for engine in engines:
            engine.backward(loss_of(engine, 100 * step))
        for engine in engines:
            engine.step()
    for engine in engines:
        assert same_bits(want, contents(engine)) == []
        engine.destroy()


def test_backwards_that_the_caller_runs() -> None:
    want = trained(None, steps=4)
    del want["norm"]
    for scaled in (True, False):
        engine = overlapped()
        for step in range(4):
            loss = loss_of(engine, 100 * step)
            (engine.scale(loss) if scaled else loss).backward()
            engine.step()
        assert same_bits(want, contents(engine)) == []
        engine.destroy()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_units(reentrant: bool) -> None:
    class Checkpointed(Tower):
        def forward(self, x: torch.Tensor, all_of_it: bool = True) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return self.last((x + self.seldom(x)) * self.scale)

    want = trained(None, steps=5, model=Checkpointed())
    assert same_bits(want, trained_overlapped(steps=5, model=Checkpointed())) == []


@pytest.mark.parametrize("where", ["module", "part", "wrapped"])
def test_a_compiled_part_finds_everything(where: str) -> None:
    results = []
    for share in (None, 0.0):
        model: Any = Tower()
        if where == "wrapped":
            model = torch.compile(model, backend="eager")
        engine = make(share, model=model, overlap_step=share is not None, stress_seed=1)
        if where == "module":
            engine.module.compile(backend="eager")
        if where == "part":
            engine.module.blocks[1].compile(backend="eager")
        for step in range(4):
            engine.backward(engine(X * (step + 1)).float().square().mean())
            engine.step()
        results.append(contents(engine))
        engine.destroy()
        torch._dynamo.reset()
    assert same_bits(*results) == []


def test_a_compiled_engine_says_that_it_can_not_wait() -> None:
    engine = overlapped()
    compiled = torch.compile(engine, backend="eager")
    engine.backward(compiled(X).float().square().mean())
    engine.step()
    with pytest.raises(RuntimeError, match=MESSAGE):
        compiled(X)
    engine.synchronize()
    engine.backward(compiled(X).float().square().mean())
    engine.step()
    engine.destroy()
    torch._dynamo.reset()


def test_copies_and_pickles_raise_or_work() -> None:
    engine = stepped()
    with pytest.raises(RuntimeError, match=MESSAGE):
        copy.deepcopy(engine.module)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.save(engine.module, io.BytesIO())
    engine.synchronize()
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    copies = [copy.deepcopy(engine.module), torch.load(file, weights_only=False)]
    before = engine.module(X).detach()
    train(engine, 1, first=2)
    for other in copies:
        other.state_dict()
        assert torch.equal(other(X), before)
        assert is_released(engine.module.blocks[1].up.weight)
        second = overlapped(model=other)
        assert all(len(part._state_dict_pre_hooks) == 1 for part in other.modules())
        train(second, 2)
        second.destroy()
    engine.destroy()


def test_a_forked_child_is_told_and_leaves_the_rest_alone() -> None:
    engine = stepped()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.module.state_dict()
            try:
                engine.module.blocks[1].up.weight.sum()
            except RuntimeError as error:
                status = 0 if MESSAGE in str(error) else 2
            engine.destroy()
            del engine
            gc.collect()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    train(engine, 2, first=2)
    want = trained(None, steps=4)
    del want["norm"]
    assert same_bits(want, contents(engine)) == []
    engine.destroy()


def test_without_states_on_the_host_it_changes_nothing() -> None:
    for share, home in ((1.0, "cpu"), (None, "none")):
        engine = make(share, overlap_step=True)
        train(engine, 3)
        assert not any(is_released(param) for param in engine.module.parameters()), home
        engine.destroy()


def test_a_row_of_blocks_without_anything_around_it() -> None:
    class Row(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(9)
            super().__init__(nn.Linear(8, WIDTH), *[Block() for _ in range(3)], nn.Linear(WIDTH, 3))

    results = []
    for share in (None, 0.0):
        engine = make(share, bucket=1, model=Row(), overlap_step=share is not None, stress_seed=3)
        for step in range(6):
            engine.backward(engine(X * (step + 1)).float().square().mean())
            engine.step()
        results.append(contents(engine))
        engine.destroy()
    assert same_bits(*results) == []


def test_a_saved_state_dict_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    engine = stepped()
    for step in range(2, 5):
        torch.save(engine.module.state_dict(), io.BytesIO())
        [param.untyped_storage().data_ptr() for param in engine.module.parameters()]
        train(engine, 1, first=step)
        assert all(is_released(param) for param in engine.module.parameters())
    assert "refers to" not in capfd.readouterr().err
    engine.destroy()


def test_data_that_somebody_kept_through_steps_is_not_overwritten_by_a_replacement() -> None:
    engine = stepped()
    engine.synchronize()
    param = engine.module.blocks[1].up.weight
    kept = param.data
    train(engine, 1, first=2)
    param.data = torch.zeros_like(param)
    with pytest.raises(pannier.ConfigError, match="replaced while something else still refers"):
        train(engine, 1, first=3)
    assert bool(kept.any())
    engine.destroy()
