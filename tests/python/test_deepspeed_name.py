"""Programs that say `import deepspeed`, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import free_port

TRAIN = """
import json, sys
import torch
import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
from deepspeed.accelerator import get_accelerator

model = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30))
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "fp16": {"enabled": True},
    },
)
assert isinstance(engine, deepspeed.DeepSpeedEngine)
torch.manual_seed(42)
x = torch.randint(0, 30, (8, 4), device=engine.device)
losses = []
for step in range(20):
    loss = torch.nn.functional.cross_entropy(engine(x).float().flatten(0, 1), x.flatten())
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert get_accelerator().max_memory_allocated() > 0
print(json.dumps({"argv": sys.argv, "version": deepspeed.__version__, "file": deepspeed.__file__}))
"""


def run(*arguments: str, cwd: Path, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    assert result.returncode == code, result.stderr
    return result


def test_script_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "\nimport beside\nassert beside.HERE == 1\n")
    (tmp_path / "beside.py").write_text("HERE = 1\n")
    output = run("-m", "pannier.deepspeed", "train.py", "--lr", "3", cwd=tmp_path).stdout
    assert '["train.py", "--lr", "3"]' in output and "0.19.6+pannier" in output and "_as_deepspeed" in output


def test_module_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/train.py").write_text(
        "import sys, deepspeed\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['a', '-b']\n"
        "print(deepspeed.__version__)\n"
    )
    assert "0.19.6+pannier" in run("-m", "pannier.deepspeed", "-m", "package.train", "a", "-b", cwd=tmp_path).stdout


def test_exit_code_and_usage(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("import sys; sys.exit(7)\n")
    run("-m", "pannier.deepspeed", "leave.py", cwd=tmp_path, code=7)
    assert "usage" in run("-m", "pannier.deepspeed", cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py", "--lr"), "can't open script 'missing.py': No such file or directory"),
        (("train.py/x",), "can't open script 'train.py/x': Not a directory"),
        (("folder",), "can't run folder 'folder': there is no __main__.py in it"),
        (("-m", "missing"), "can't find module 'missing'"),
        (("-m", "missing.part"), "can't find module 'missing.part'"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    error = run("-m", "pannier.deepspeed", *arguments, cwd=tmp_path, code=2).stderr
    assert error == f"pannier.deepspeed: error: {message}\n"


def test_workers_and_children_find_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import multiprocessing, subprocess, sys
import deepspeed

def version(_):
    import deepspeed
    return deepspeed.__version__

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(version, [0]) == ["0.19.6+pannier"], method
    ask = "import deepspeed; print(deepspeed.__version__)"
    child = subprocess.run([sys.executable, "-c", ask], capture_output=True)
    assert child.stdout.strip() == b"0.19.6+pannier", child
    print("all found")
"""
    )
    assert "all found" in run("-m", "pannier.deepspeed", "train.py", cwd=tmp_path).stdout


def test_metadata_says_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(
        "import importlib.metadata, importlib.util\n"
        "assert importlib.util.find_spec('deepspeed') is not None\n"
        "assert importlib.metadata.metadata('deepspeed')['Name'] == 'deepspeed'\n"
        "print(importlib.metadata.version('deepspeed'))\n"
    )
    assert run("-m", "pannier.deepspeed", "ask.py", cwd=tmp_path).stdout.strip() == "0.19.6+pannier"


def test_it_is_on_no_path_otherwise(tmp_path: Path) -> None:
    result = run("-c", "import pannier, sys; assert not any('_as_deepspeed' in p for p in sys.path)", cwd=tmp_path)
    assert result.returncode == 0


def test_install_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import pannier.deepspeed\npannier.deepspeed.install()\npannier.deepspeed.install()\n" + TRAIN
    )
    assert "0.19.6+pannier" in run("train.py", cwd=tmp_path).stdout


@pytest.mark.parametrize("early", ["deepspeed", "accelerate"])
def test_install_too_late(tmp_path: Path, early: str) -> None:
    (tmp_path / f"{early}.py").write_text("")
    program = f"import {early}, pannier.deepspeed\npannier.deepspeed.install()\n"
    (tmp_path / "late.py").write_text(program)
    assert f"before the first import of {early}" in run("late.py", cwd=tmp_path, code=1).stderr


def test_missing_names_say_so(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(
        """
import deepspeed
for owner, name in ((deepspeed, "init_inference"), (deepspeed.zero, "TiledLinear"), (deepspeed.comm, "nothing")):
    try:
        getattr(owner, name)
    except AttributeError as error:
        assert "Pannier" in str(error) and name in str(error), error
    else:
        raise SystemExit(f"{name} was there")
    assert not hasattr(owner, name)
import deepspeed.inference
"""
    )
    error = run("-m", "pannier.deepspeed", "ask.py", cwd=tmp_path, code=1).stderr
    assert "ModuleNotFoundError" in error and "deepspeed.inference" in error and "Pannier" in error


def test_names_that_scripts_import(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(
        """
import argparse
import deepspeed, torch
import deepspeed.comm as dist
from deepspeed import DeepSpeedEngine, add_config_arguments, init_distributed, log_dist, logger, zero
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters, Init, ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from deepspeed.utils import set_z3_leaf_modules

args = add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
assert args.deepspeed and args.deepspeed_config == "x.json"
logger.setLevel("WARNING")
assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
assert (dist.get_rank(), dist.get_world_size(), dist.is_initialized()) == (0, 1, False)
dist.init_distributed(dist_backend=None, auto_mpi_discovery=False)
assert dist.is_initialized() and torch.distributed.get_world_size() == 1
dist.barrier()
with zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
    model = torch.nn.Linear(2, 2)
with zero.GatheredParameters(model.weight, modifier_rank=0):
    model.weight.data.zero_()
with zero.GatheredParameters([]):
    pass
assert deepspeed.accelerator.get_accelerator().current_device_name() == "cpu"
tied = clone_tensors_for_torch_save({"a": [torch.ones(4)[:2]]})
assert tied["a"][0].untyped_storage().nbytes() == 8

from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.utils.zero_to_fp32 import get_optim_files
section = DeepSpeedZeroConfig(stage=3, stage3_gather_fp16_weights_on_model_save=True, overlap_comm=True)
assert (section.stage, section.gather_16bit_weights_on_model_save, section.overlap_comm) == (3, True, True)
assert DeepSpeedZeroOffloadOptimizerConfig(device="cpu").device == "cpu"
assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled and not get_float16_config({}).enabled
import pathlib
names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
for name in names:
    pathlib.Path(name).write_text("")
assert get_optim_files(".") == names

from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
KINDS = (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, FP16_Optimizer,
         FP16_UnfusedOptimizer, BF16_Optimizer)
zero12, zero3 = [True, True, True, False] + [False] * 3, [True, True, False, True] + [False] * 3
fused, unfused = ([True, False, False, False, is_fused, not is_fused, False] for is_fused in (True, False))
for stage, half, kind, wanted in ((0, False, FusedAdam, [False] * 7), (0, True, FusedAdam, fused), (0, True, torch.optim.Adam, unfused),
                                  (1, True, FusedAdam, zero12), (2, False, FusedAdam, zero12), (3, True, FusedAdam, zero3)):
    model = torch.nn.Linear(2, 2)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": half}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config)
    assert [isinstance(optimizer, one) for one in KINDS] == wanted, (stage, half, kind)
    assert not any(isinstance(optimizer.optimizer, one) for one in KINDS)
    engine.destroy()
"""
    )
    run("-m", "pannier.deepspeed", "ask.py", cwd=tmp_path)


def test_files_have_the_names_that_scripts_look_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import deepspeed, torch
model = torch.nn.Linear(4, 2)
engine, *_ = deepspeed.initialize(model=model, config={
    "train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}})
engine.save_checkpoint("run", tag="a")
assert engine.save_16bit_model("model") and torch.equal(torch.load("model/pytorch_model.bin")["bias"], model.bias)
"""
    )
    run("-m", "pannier.deepspeed", "train.py", cwd=tmp_path)
    run("zero_to_fp32.py", ".", "out", cwd=tmp_path / "run")
    ask = "import torch; print(*torch.load('run/out/pytorch_model.bin'))"
    assert run("-c", ask, cwd=tmp_path).stdout.split() == ["weight", "bias"]


def test_recomputation_by_deepspeeds_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import deepspeed, torch

def pair(x, y, *, scale, shift=None):
    return [x * y * scale, None] if shift is None else [x * y * scale + shift]

x, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
deepspeed.checkpointing.configure(None, partition_activations=True, num_checkpoints=2)
first, second = deepspeed.checkpointing.checkpoint(pair, x, 3, scale=scale)
assert second is None
alone = deepspeed.checkpointing.checkpoint(pair, x, 3, scale=scale, shift=1)
(first + alone).sum().backward()
assert x.grad.tolist() == [12, 12, 12] and scale.grad.tolist() == [6, 6, 6]
(again,) = [deepspeed.checkpointing.non_reentrant_checkpoint(lambda x: (x * scale,), torch.ones(3))]
again.sum().backward()
assert scale.grad.tolist() == [7, 7, 7]
"""
    )
    run("-m", "pannier.deepspeed", "train.py", cwd=tmp_path)


def test_names_that_scripts_reach_without_importing(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(
        """
import deepspeed
print([eval(name).__name__ for name in (
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
    "deepspeed.runtime.fp16.loss_scaler",
    "deepspeed.utils.zero_to_fp32.get_optim_files",
)])
"""
    )
    run("-m", "pannier.deepspeed", "ask.py", cwd=tmp_path)


def test_flags_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, deepspeed\n"
        "deepspeed.init_distributed()\n"
        "path = f'out{deepspeed.comm.get_rank()}'\n"
        "open(path, 'w').write(f'{deepspeed.comm.get_world_size()} {sys.argv[1:]}')\n"
    )
    (tmp_path / "hosts").write_text("# machines\nlocalhost slots=2\n")
    for flags in (("--num_gpus", "2"), ("--hostfile", "hosts")):
        port = str(free_port())
        run("-m", "pannier.deepspeed", *flags, "--master_port", port, "train.py", "--lr", "3", cwd=tmp_path)
        for rank in range(2):
            assert (tmp_path / f"out{rank}").read_text() == "2 ['--lr', '3']"
            (tmp_path / f"out{rank}").unlink()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hostfile", "none", "train.py"), "can't read host file none: No such file or directory"),
        (("--hostfile", "wrong", "train.py"), "wrong, line 1: expected a new `name slots=N`, not 'a slots=x'"),
        (("--hostfile", "two", "train.py"), "which machine is this? Give --node_rank"),
        (("--hostfile", "two", "--num_nodes", "3", "train.py"), "--num_nodes is 3, but two has 2 machines"),
        (("--num_nodes", "2", "--node_rank", "0", "train.py"), "several machines need --master_addr or --hostfile"),
        (("--num_gpus", "x", "train.py"), "invalid int value: 'x'"),
        (("--num_gpus", "2"), "the following arguments are required: program"),
    ],
)
def test_flags_that_cannot_be(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    (tmp_path / "wrong").write_text("a slots=x\n")
    (tmp_path / "two").write_text("a slots=1\nb slots=1\n")
    error = run("-m", "pannier.deepspeed", *flags, cwd=tmp_path, code=2).stderr
    assert error.startswith("pannier.deepspeed: error: ") and message in error and error.count("\n") == 1
