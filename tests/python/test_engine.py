"""The engine's verbs, and what it says when they come in a wrong order."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import pannier
from reference import DTYPES, OPTIMIZERS, Zoo, cells, config, gradients

SGD = {"type": "SGD", "params": {"lr": 0.5}}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.extra = "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()

    def describe(self) -> str:
        return "a line"


def engine_of(optimizer: dict = SGD, **kw) -> pannier.Engine:
    return pannier.initialize(model=Line(), config=config(optimizer, **kw))[0]


def test_backward_returns_the_loss_over_the_accumulation_steps() -> None:
    engine = engine_of(gas=4)
    loss = engine(torch.tensor([1.0, 1.0]))
    assert engine.backward(loss).item() == loss.item() / 4
    engine = engine_of(gas=4)
    assert engine.backward(engine(torch.tensor([1.0, 1.0])), scale_wrt_gas=False).item() == 3.0


def test_retain_graph() -> None:
    engine = engine_of()
    loss = engine(torch.tensor([1.0, 1.0]))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    assert engine.module.w.tolist() == [0.0, 1.0]


def test_scale_and_a_backward_of_ones_own() -> None:
    for dtype in DTYPES:
        results = []
        for own in (False, True):
            engine = engine_of(dtype=dtype, gas=2)
            for _ in range(4):
                loss = engine(torch.tensor([1.0, -1.0]))
                if own:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
            assert engine.global_steps == 2 and engine.module.w.grad is None
            results.append(engine.module.w.tolist())
        assert results[0] == results[1] == [0.0, 3.0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_backward_is_the_engines(stage: int, dtype: str) -> None:
    """Its gradients are divided by the accumulation steps, as the loss of `engine.backward()` is."""
    for gas, managed in ((1, True), (2, True), (2, False)):
        results = []
        for plain in (False, True):
            engine = engine_of(stage=stage, dtype=dtype, gas=gas, managed_gradient_accumulation=managed)
            for _ in range(4):
                loss = engine(torch.tensor([1.0, -1.0]))
                loss.backward() if plain else engine.backward(loss)
                engine.step()
            results.append(engine.module.w.tolist())
        assert results[0] == results[1] == ([0.0, 3.0] if gas == 2 else [-1.0, 4.0]), (gas, managed)


def test_a_plain_backward_cannot_scale_its_loss() -> None:
    engine = engine_of(dtype="fp16")
    with pytest.raises(RuntimeError, match=r"Loss scaling is required.*engine\.backward"):
        engine(torch.tensor([1.0, 1.0])).backward()


@pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True), torch.ones(()), 3.0, None])
def test_loss_that_cannot_be(loss) -> None:
    engine = engine_of()
    for verb in (engine.backward, engine.scale):
        with pytest.raises(pannier.ConfigError, match="loss"):
            verb(loss)
        with pytest.raises(AssertionError):
            verb(loss)


def test_step_before_backward() -> None:
    engine = engine_of()
    with pytest.raises(pannier.ConfigError, match="backward"):
        engine.step()
    assert engine.global_steps == 0 and engine.micro_steps == 0
    engine.backward(engine(torch.ones(2)))
    engine.step()
    with pytest.raises(pannier.ConfigError, match="backward"):
        engine.step()


def test_backward_twice_on_one_graph() -> None:
    engine = engine_of()
    loss = engine(torch.ones(2)).pow(2)
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)
    with pytest.raises(pannier.ConfigError, match="failed"):
        engine.step()
    engine.backward(engine(torch.ones(2)))
    engine.step()
    assert engine.module.w.tolist() == [0.5, 1.5] and engine.global_steps == 1


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("my own")


def test_backward_that_raises_drops_the_window() -> None:
    for stage, offload in cells():
        engine = engine_of(gas=2, stage=stage, offload=offload)
        engine.backward(engine(torch.ones(2)))
        engine.step()
        with pytest.raises(ValueError, match="my own") as error:
            engine.backward(engine(torch.ones(2)) + Breaks.apply(engine.module.w).sum())
        assert type(error.value) is ValueError
        with pytest.raises(pannier.ConfigError, match="failed"):
            engine.step()
        assert engine.module.w.tolist() == [1.0, 2.0]
        for _ in range(2):
            engine.backward(engine(torch.ones(2)))
            engine.step()
        assert engine.module.w.tolist() == [0.5, 1.5]


def test_drop_gradients_starts_the_window_anew() -> None:
    engine = engine_of(gas=2)
    engine.backward(engine(torch.full((2,), 100.0)))
    engine.step()
    engine.drop_gradients()
    for _ in range(2):
        engine.backward(engine(torch.ones(2)))
        engine.step()
    assert engine.module.w.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("of", ["engine", "optimizer"])
def test_zero_grad_keeps_an_open_window(of: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(gas=2)
    for _ in range(4):
        engine.backward(engine(torch.ones(2)))
        engine.step()
        (engine if of == "engine" else engine.optimizer).zero_grad()
    assert engine.module.w.tolist() == [0.0, 1.0] and engine.global_steps == 2
    assert caplog.text.count("zero_grad() in the middle") == 1


def test_no_sync() -> None:
    for stage in (2, 3):
        with pytest.raises(AssertionError, match=f"stage {stage}"), engine_of(stage=stage).no_sync():
            pass
    for stage in (0, 1):
        engine = engine_of(stage=stage)
        with engine.no_sync():
            engine.backward(engine(torch.ones(2)))
            with pytest.raises(AssertionError, match="no_sync"):
                engine.step()
            with pytest.raises(AssertionError, match="no_sync"), engine.no_sync():
                pass
        engine.backward(engine(torch.ones(2)))
        engine.step()
        assert engine.module.w.tolist() == [0.0, 1.0]


def test_coalesce_grad_reduction() -> None:
    with pytest.raises(NotImplementedError, match="stage 0"), engine_of(stage=0).coalesce_grad_reduction():
        pass
    for stage in (1, 2, 3):
        engine = engine_of(stage=stage)
        with engine.coalesce_grad_reduction():
            for _ in range(3):
                engine.backward(engine(torch.ones(2)))
            with pytest.raises(AssertionError):
                engine.step()
        engine.step()
        assert engine.module.w.tolist() == [-0.5, 0.5]


def test_unmanaged_accumulation() -> None:
    engine = engine_of(gas=4, managed_gradient_accumulation=False)
    with pytest.raises(AssertionError):
        engine.set_gradient_accumulation_boundary(True)
    for _ in range(3):
        engine.backward(engine(torch.full((2,), 4.0)), scale_wrt_gas=False)
    engine.step()
    assert engine.module.w.tolist() == [-5.0, -4.0] and engine.global_steps == 1
    assert engine.global_samples == 3  # As many micro-batches as there were, not as many as are configured.


def test_modes() -> None:
    engine = engine_of()
    assert engine.training and engine.module.training
    engine.eval()
    assert not engine.module.training
    engine.train()
    assert engine.module.training
    engine.module.eval()
    assert engine.training


def test_attributes_fall_through_to_the_module() -> None:
    engine = engine_of()
    assert engine.extra == "mine" and engine.describe() == "a line"
    assert dict(engine.named_parameters())["module.w"] is engine.module.w
    with pytest.raises(AttributeError, match="nothing"):
        engine.nothing
    assert not hasattr(engine, "nothing")


def test_values_that_people_read() -> None:
    engine = engine_of(OPTIMIZERS["AdamW"][0], offload=True, clipping=0.5, dtype="fp16", gas=3)
    assert (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert engine.device == torch.device("cpu")
    assert engine.get_lr() == [0.01] and engine.get_mom() == [(0.9, 0.99)] and engine.get_type() == [0.0]
    assert engine.config.get("zero_optimization")["offload_optimizer"]["device"] == "cpu"
    assert engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.dynamic_loss_scale()
    assert engine.initial_dynamic_scale() == 2**8 and engine.gradient_clipping() == 0.5
    assert engine.get_data_types()[0] is torch.float16
    assert engine.zero_optimization() and engine.zero_cpu_offload() and engine.zero_use_cpu_optimizer()
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()
    assert engine.train_batch_size() == 3 and engine.global_samples == 0
    for _ in range(6):
        engine.backward(engine(torch.ones(2)))
        engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 6, 6)
    json.dumps(engine.config)


def test_memory_stats_and_plan() -> None:
    engine = pannier.initialize(model=Zoo(), config=config(OPTIMIZERS["AdamW"][0], offload=True, dtype="bf16"))[0]
    for step in range(2):
        engine.backward(engine(gradients(step, 0, torch.bfloat16)))
        engine.step()
    stats = engine.memory_stats()
    for tier in ("device", "host"):
        assert stats[tier]["peak"] >= stats[tier]["current"] > 0
    trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    assert stats["host"]["current"] >= 10 * trained
    plan = engine.plan()
    assert plan["device"]["total"] > 0 and plan["host"]["total"] == stats["host"]["current"]
    assert str(plan) == plan["text"]


def test_module_state_dict_and_back() -> None:
    for dtype in DTYPES:
        engine = pannier.initialize(model=Zoo(), config=config(OPTIMIZERS["AdamW"][0], offload=True, dtype=dtype))[0]
        saved = copy.deepcopy(engine.module_state_dict())
        assert set(saved) - set(engine.module_state_dict(exclude_frozen_parameters=True)) == {"frozen"}
        engine.backward(engine(gradients(0, 0, DTYPES[dtype])))
        engine.step()
        assert not torch.equal(engine.module.matrix, saved["matrix"])
        engine.load_module_state_dict({"module": saved})
        assert torch.equal(engine.module.matrix, saved["matrix"])
        assert torch.equal(pannier.safe_get_full_fp32_param(engine.module.matrix), saved["matrix"].float())


def test_sparse_gradient_is_an_error() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    engine = pannier.initialize(model=model, config=config(SGD))[0]
    with pytest.raises(ValueError, match="weight"):
        engine.backward(engine(torch.tensor([1])).sum())


def test_gradient_set_by_hand_is_an_error() -> None:
    engine = engine_of()
    engine.backward(engine(torch.ones(2)))
    engine.module.w.grad = torch.ones(2)
    with pytest.raises(pannier.ConfigError, match="w"):
        engine.step()


def test_parameter_replaced_later_is_an_error() -> None:
    def replace_parameter(model: nn.Sequential) -> None:
        model[1].weight = nn.Parameter(torch.ones(1, 2))

    def replace_module(model: nn.Sequential) -> None:
        model[1] = nn.Linear(2, 1)

    def normalise(model: nn.Sequential) -> None:
        nn.utils.parametrizations.weight_norm(model[1])

    def convert(model: nn.Sequential) -> None:
        model.double()

    for change in (replace_parameter, replace_module, normalise, convert):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        engine = pannier.initialize(model=model, config=config(SGD))[0]
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        change(model)
        with pytest.raises(ValueError, match=r"[01]\.(weight|bias|parametrizations)|^1 is"):  # noqa: PT012
            engine.backward(engine(torch.ones(1, 2, dtype=model[0].weight.dtype)).sum())
            engine.step()
        engine.destroy()


def test_parameter_unfrozen_later_is_an_error() -> None:
    engine = pannier.initialize(model=Zoo(), config=config(SGD))[0]
    engine.module.frozen.requires_grad_(True)
    engine.backward(engine(gradients(0, 0, torch.float32)))
    with pytest.raises(pannier.ConfigError, match="frozen was frozen"):
        engine.step()


def test_parameter_frozen_later_is_an_error_or_is_left_alone() -> None:
    engine = pannier.initialize(model=Zoo(), config=config(SGD))[0]
    engine.module.matrix.requires_grad_(False)
    before = engine.module.matrix.detach().clone()
    grads = gradients(0, 0, torch.float32)
    engine.backward(engine(grads))
    try:
        engine.step()
    except pannier.ConfigError as error:
        assert "matrix" in str(error)
    assert torch.equal(engine.module.matrix, before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_nothing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
            for part in (self.norm, self.second):
                part.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.second(self.first(self.norm(x))))

    class Blocks(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])
            self.blocks[2].first.weight = self.blocks[0].first.weight
            self.recompute = recompute

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.recompute else block(x)
            return x

    for stage, offload in cells():
        results = []
        for recompute in (False, True):
            model = Blocks(recompute)
            settings = config(OPTIMIZERS["AdamW"][0], stage=stage, offload=offload, gas=2, clipping=1.0)
            engine = pannier.initialize(model=model, config=settings)[0]
            norms = []
            for step in range(3):
                for micro in range(2):
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + micro))
                    engine.backward(engine(x.requires_grad_()).pow(2).mean())
                    engine.step()
                norms.append(engine.get_global_grad_norm())
            results.append((norms, [param.detach().clone() for param in model.parameters()]))
            engine.destroy()
        assert results[0][0] == results[1][0]
        assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_arguments_of_the_wrong_type_are_named() -> None:
    engine = engine_of()
    for value in ("4", True, None, 0, 2.0):
        with pytest.raises(pannier.ConfigError, match=f"micro_batch_size .*{value!r}"):
            engine.set_train_micro_batch_size(value)
        with pytest.raises(pannier.ConfigError, match=f"train_batch_size .*{value!r}"):
            engine.set_train_batch_size(value)
    engine.backward(engine(torch.ones(2)))
    for verb in (pannier.safe_set_full_grad, pannier.safe_set_full_fp32_param):
        with pytest.raises(pannier.ConfigError, match="value must be a tensor, not 3"):
            verb(engine.module.w, 3)
    with pytest.raises(pannier.ConfigError, match="value must be a tensor, not None"):
        pannier.safe_set_full_optimizer_state(engine.module.w, None, "exp_avg")
