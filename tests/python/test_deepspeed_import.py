"""Checkpoints that DeepSpeed 0.19.6 wrote: the same fp32 weights and moments, without running code from their files."""

from __future__ import annotations

import pathlib
import pickle
import shutil
from typing import Any

import pytest
import torch

import pannier
from pannier import zero_to_fp32
from pannier.checkpoints import state_dict_of
from pannier.deepspeed_import import import_checkpoint
from deepspeed_fixture import SEEN, Net, groups_of
from reference import config

CASES = pathlib.Path(__file__).parent / "cases" / "deepspeed"
ADAMW = {"type": "AdamW", "params": {"lr": 0.5}}


@pytest.mark.parametrize("kind", ["stage1", "stage2", "stage3", "universal"])
def test_weights_and_moments_are_deepspeeds(tmp_path: pathlib.Path, kind: str) -> None:
    truth = torch.load(CASES / ("stage3" if kind == "universal" else kind) / "truth.pt", weights_only=True)
    assert import_checkpoint(CASES / kind, tmp_path, "t3") == str(tmp_path / "t3")
    model = Net()
    engine, *_ = pannier.initialize(
        model=model,
        model_parameters=groups_of(model),
        config=config(
            ADAMW,
            dtype="bf16",
            scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        ),
    )
    path, client_state = engine.load_checkpoint(tmp_path)
    assert (path, client_state, engine.global_steps) == (str(tmp_path / "t3"), {"epoch": 2}, 3)
    assert model.seen.tolist() == SEEN.tolist()
    assert {"embed.weight", "up.weight", "up.bias", "norm.weight", "norm.bias"} <= truth.keys()
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert torch.equal(pannier.safe_get_full_fp32_param(param), truth[name]["fp32_param"]), name
            for state in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(pannier.safe_get_full_optimizer_state(param, state), truth[name][state]), name
    assert {engine.optimizer.state[param]["step"] for param in engine.optimizer.state} == {3}
    torch.manual_seed(3)
    assert torch.equal(model.frozen.weight, _seeded().frozen.weight.bfloat16())
    if kind != "universal":
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
    assert engine.get_lr()[0] < 0.011


def _seeded() -> torch.nn.Module:
    torch.manual_seed(3)
    return Net()


def test_zero_to_fp32_reads_both_kinds(tmp_path: pathlib.Path) -> None:
    truth = torch.load(CASES / "stage3" / "truth.pt", weights_only=True)
    import_checkpoint(CASES / "stage3", tmp_path / "ours", "t3")
    for folder in (CASES / "stage3", tmp_path / "ours"):
        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "t3")
        assert state.keys() == Net().state_dict().keys()
        assert state["head.weight"] is state["embed.weight"]
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        assert torch.equal(state["up.weight"], truth["up.weight"]["fp32_param"])
        kept = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "t3", exclude_frozen_parameters=True)
        assert "frozen.weight" not in kept and "head.weight" in kept
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), tmp_path / "ours")
    assert torch.equal(model.head.weight, truth["embed.weight"]["fp32_param"])
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ours", tmp_path / "bin")
    loaded = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["up.bias"], truth["up.bias"]["fp32_param"])
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        CASES / "stage3", tmp_path / "safe", safe_serialization=True, tag="t3"
    )
    assert (tmp_path / "safe" / "model.safetensors").exists()


def test_a_conversion_leaves_a_whole_file_whoever_else_converts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts convert on every rank, into one file, and each reads it when it has written."""
    real = torch.save

    def slowly(state: Any, path: str) -> None:
        pathlib.Path(path).write_bytes(b"half of it")
        if first.exists():  # Another rank that is done reads.
            assert torch.load(first, weights_only=True).keys() == Net().state_dict().keys()
        real(state, path)

    first = tmp_path / "bin" / "pytorch_model.bin"
    monkeypatch.setattr(torch, "save", slowly)
    for _ in range(2):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(CASES / "stage3", tmp_path / "bin", tag="t3")
    assert [path.name for path in first.parent.iterdir()] == ["pytorch_model.bin"]
    for size, is_cut in (("300", True), ("5GB", False), ("300", True)):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(CASES / "stage3", tmp_path / "safe", size, True, "t3")
        found = {path.name for path in (tmp_path / "safe").iterdir()}
        assert ("model.safetensors.index.json" in found, "model.safetensors" in found) == (is_cut, not is_cut)


class Evil:
    def __reduce__(self) -> Any:
        return __import__("os").mkdir, ("evil",)


def test_files_that_would_run_code_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CASES / "stage2", tmp_path / "in")
    path = next((tmp_path / "in" / "t3").glob("*model_states.pt"))
    torch.save({"module": {}, "evil": Evil()}, path, pickle_module=pickle)
    with pytest.raises(pannier.ConfigError, match="without running code"):
        import_checkpoint(tmp_path / "in", tmp_path / "out", "t3")
    assert not (tmp_path / "evil").exists()


def test_missing_ranks_are_named(tmp_path: pathlib.Path) -> None:
    shutil.copytree(CASES / "stage2", tmp_path / "in")
    next((tmp_path / "in" / "t3").glob("*rank_1*optim_states.pt")).unlink()
    with pytest.raises(pannier.ConfigError, match="written by 2 ranks, but has optimizer states of 1"):
        import_checkpoint(tmp_path / "in", tmp_path / "out", "t3")
    with pytest.raises(pannier.ConfigError, match="no checkpoint 't4'"):
        import_checkpoint(tmp_path / "in", tmp_path / "out", "t4")


def test_an_imported_checkpoint_is_whole(tmp_path: pathlib.Path) -> None:
    import_checkpoint(CASES / "stage1", tmp_path, "t3")
    assert state_dict_of(tmp_path)["seen"].tolist() == SEEN.tolist()
