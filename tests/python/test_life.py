"""Copies, several engines, ends, forks."""

from __future__ import annotations

import copy
import gc
import io
import os
import pathlib
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import pannier
from reference import DTYPES, OPTIMIZERS, Zoo, cells, config, gradients

ADAMW = OPTIMIZERS["AdamW"][0]


def test_module_copies_and_pickles() -> None:
    for stage, offload in cells():
        for dtype in DTYPES:
            engine = pannier.initialize(model=Zoo(), config=config(ADAMW, stage=stage, offload=offload, dtype=dtype))[0]
            grads = gradients(0, 0, DTYPES[dtype])
            engine.backward(engine(grads))
            engine.step()
            copies = [copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))]
            file = io.BytesIO()
            torch.save(engine.module, file)
            file.seek(0)
            copies.append(torch.load(file, weights_only=False))
            for other in copies:
                assert other.embedding is other.head
                for (name, left), right in zip(engine.module.named_parameters(), other.parameters(), strict=True):
                    assert torch.equal(left, right), name
                    assert (right is not left and right.data_ptr() != left.data_ptr()) or left.numel() == 0
                # A copy is nobody's: its gradients stay with it.
                other(grads).backward()
                assert other.matrix.grad is not None
                assert pannier.safe_get_full_fp32_param(other.matrix) is None
            before = engine.module.matrix.detach().clone()
            engine.backward(engine(grads))
            engine.step()
            assert not torch.equal(engine.module.matrix, before) and torch.equal(copies[0].matrix, before)
            engine.destroy()


def test_a_copy_can_have_an_engine_of_its_own() -> None:
    first = pannier.initialize(model=Zoo(), config=config(ADAMW))[0]
    second = pannier.initialize(model=copy.deepcopy(first.module), config=config(ADAMW))[0]
    second.backward(second(gradients(0, 0, torch.float32)))
    second.step()
    assert second.global_steps == 1 and first.global_steps == 0
    assert not torch.equal(first.module.matrix, second.module.matrix)


def test_several_engines_at_once() -> None:
    """A generator and a discriminator, each trained through the other."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    engines = [
        pannier.initialize(model=model, config=config(ADAMW, offload=offload, dtype="fp32"))[0]
        for model, offload in ((maker, True), (judge, False))
    ]
    for _ in range(3):
        for engine in engines:
            loss = engines[1](engines[0](torch.ones(3, 2))).mean()
            engine.backward(loss)
            for each in engines:
                if each is engine:
                    each.step()
                else:
                    each.zero_grad()
    assert [engine.global_steps for engine in engines] == [3, 3]


def test_ten_engines_in_a_row_leave_nothing() -> None:
    model = nn.Linear(256, 256)
    in_use = []
    for _ in range(10):
        engine = pannier.initialize(model=model, config=config(ADAMW, offload=True))[0]
        engine.backward(engine(torch.ones(1, 256)).sum())
        engine.step()
        in_use.append(engine.memory_stats()["host"]["current"])
        engine.destroy()
        del engine
        gc.collect()
    assert max(in_use) == min(in_use)


def test_engine_is_freed_with_its_last_reference() -> None:
    engine, optimizer, _, scheduler = pannier.initialize(
        model=Zoo(),
        config=config(ADAMW, scheduler={"type": "WarmupLR", "params": {}}),
    )
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    with pytest.raises(pannier.ConfigError, match="gone"):
        optimizer.step()


def test_an_engine_in_a_forgotten_cycle_is_in_nobodys_way() -> None:
    model = nn.Linear(4, 4)
    gc.disable()
    try:
        holder: dict[str, Any] = {"engine": pannier.initialize(model=model, config=config(ADAMW))[0]}
        holder["me"] = holder
        del holder
        engine = pannier.initialize(model=model, config=config(ADAMW))[0]
    finally:
        gc.enable()
    engine.destroy()


def test_after_destroy() -> None:
    engine, optimizer, _, _ = pannier.initialize(model=Zoo(), config=config(ADAMW))
    engine.destroy()
    for verb in (
        lambda: engine(gradients(0, 0, torch.float32)),
        lambda: engine.backward(torch.ones((), requires_grad=True) * 1),
        engine.step,
        engine.zero_grad,
        engine.memory_stats,
        engine.get_global_grad_norm,
        lambda: engine.global_steps,
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.overflow,
    ):
        with pytest.raises(pannier.ConfigError, match="destroyed"):
            verb()
    assert pannier.safe_get_full_fp32_param(engine.module.matrix) is None
    # The module is an ordinary one again.
    engine.module(gradients(0, 0, torch.float32)).backward()
    assert engine.module.matrix.grad is not None


def test_destroy_after_an_error_in_forward() -> None:
    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise RuntimeError("device out of memory. Tried too much")
            return (self.w * x).sum()

    for stage, offload in cells():
        model = Full()
        engine = pannier.initialize(model=model, config=config(ADAMW, stage=stage, offload=offload))[0]
        with pytest.raises(RuntimeError, match="out of memory"):
            engine(torch.ones(2))
        engine.destroy()
        model.fails = False
        engine = pannier.initialize(model=model, config=config(ADAMW, stage=stage, offload=offload))[0]
        engine.backward(engine(torch.ones(2)))
        engine.step()
        engine.destroy()


def test_forked_child_does_nothing() -> None:
    engine = pannier.initialize(model=Zoo(), config=config(ADAMW, offload=True))[0]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.step()
        except pannier.ConfigError as error:
            os.write(write, str(error).encode())
        engine.destroy()
        del engine
        gc.collect()
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    message = os.read(read, 1000).decode()
    os.close(read)
    assert status == 0 and f"process {os.getpid()}" in message
    engine.backward(engine(gradients(0, 0, torch.float32)))
    engine.step()


def test_process_ends_cleanly_with_engines_alive() -> None:
    program = """
import os, sys, torch, pannier
model = torch.nn.Linear(64, 64)
engine = pannier.initialize(model=model, config={"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})[0]
engine.backward(engine(torch.ones(1, 64)).sum()); engine.step()
child = os.fork()
if child == 0: sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_data_loader_workers_by_fork() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    engine = pannier.initialize(model=nn.Linear(4, 1), config=config(ADAMW, offload=True))[0]
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)
    for (batch,) in loader:
        engine.backward(engine(batch).mean())
        engine.step()
    assert engine.global_steps == 4


def test_engine_itself_does_not_copy_or_pickle() -> None:
    engine = pannier.initialize(model=Zoo(), config=config(ADAMW))[0]
    for verb in (copy.deepcopy, copy.copy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(pannier.ConfigError, match=r"engine\.module"):
            verb(engine)
        with pytest.raises(pannier.ConfigError, match=r"optimizer\.state_dict"):
            verb(engine.optimizer)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("verb", ["backward", "scale", "step"])
def test_batch_size_auto_is_seen_by_a_compiled_forward(verb: str, dynamic: bool) -> None:
    settings = {"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = pannier.initialize(model=nn.Linear(3, 1), config=settings)[0]
    compiled = torch.compile(engine, backend="eager", fullgraph=True, dynamic=dynamic)
    for samples in (5, 4, 5):  # The first batch decides.
        loss = compiled(torch.ones(samples, 3)).mean()
        if verb == "backward":
            engine.backward(loss)
        else:
            (engine.scale(loss) if verb == "scale" else loss).backward()
        engine.step()
    assert engine.get_batch_info() == (5, 5, 1) and engine.global_samples == 15


def test_forward_compiles_in_one_graph() -> None:
    engine = pannier.initialize(model=nn.Linear(3, 1), config=config(ADAMW))[0]
    compiled = torch.compile(engine, backend="eager", fullgraph=True)
    weight = engine.module.weight.detach().clone()
    engine.backward(compiled(torch.ones(2, 3)).mean())
    engine.step()
    assert engine.global_steps == 1 and not torch.equal(engine.module.weight, weight)


def test_compiled_before_initialize(tmp_path: pathlib.Path) -> None:
    """The same bits at each stage and home, and checkpoints that a model loads which is not compiled."""

    def net(how: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
        if how == "in place":
            model.compile(backend="aot_eager")
        elif how == "a part":
            model[0] = torch.compile(model[0], backend="eager")
        return torch.compile(model, backend="aot_eager") if how == "whole" else model

    def settings(stage: int, offload: bool) -> dict[str, Any]:
        home = {"offload_optimizer": {"device": "cpu"}} if offload else {}
        return config(ADAMW, stage=stage, gas=2, zero=home)

    def train(engine: pannier.Engine, first: int, last: int) -> dict[str, torch.Tensor]:
        for step in range(first, last):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            engine.backward((engine(x) - x).pow(2).mean())
            engine.step()
        return {name.replace("_orig_mod.", ""): value.clone() for name, value in engine.module.state_dict().items()}

    for stage, offload in ((0, False), (1, True), (2, False), (2, True)):
        plain = pannier.initialize(model=net(""), config=settings(stage, offload))[0]
        half, whole = train(plain, 0, 4), train(plain, 4, 6)
        for how in ("whole", "in place", "a part"):
            engine = pannier.initialize(model=net(how), config=settings(stage, offload))[0]
            found = train(engine, 0, 4)
            assert all(torch.equal(found[name], half[name]) for name in half), (stage, offload, how)
            folder = tmp_path / f"{stage}{offload}{how}"
            engine.save_checkpoint(folder)
            plain.load_checkpoint(folder)
            found = train(plain, 4, 6)
            assert all(torch.equal(found[name], whole[name]) for name in whole), (stage, offload, how)
            engine.load_checkpoint(folder)
            engine.destroy()
        plain.destroy()


def test_a_model_that_nobody_holds_is_freed_at_once() -> None:
    """Not when Python's collector comes by: that may be long after, and the memory is the device's."""
    gc.collect()
    gc.disable()
    try:
        for overlap in (False, True):
            for stage in (2, 3):
                model = Zoo()
                settings = config(ADAMW, stage=stage, offload=True, pannier={"overlap_step": overlap})
                engine = pannier.initialize(model=model, config=settings)[0]
                engine.backward(engine(gradients(0, 0, torch.float32)))
                engine.step()
                engine.optimizer.state_dict()
                engine.destroy()
                held = [weakref.ref(one) for one in (engine, model, engine.optimizer)]
                del engine, model
                assert [ref() for ref in held] == [None, None, None]
    finally:
        gc.enable()
