"""Accelerate on Pannier: plugin, configuration file and launcher, both contracts of its engine wrapper, and everyday files."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

import frameworks
from small_models import digest, llama, samples

EVERYDAY = pathlib.Path(__file__).parent / "everyday"
CELLS = [(0, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "param")]


def accelerator(plugin: Any, **more: Any) -> Any:
    """An Accelerator, as if it were the process's first."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import set_seed

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    set_seed(3)
    return Accelerator(deepspeed_plugin=plugin, **more)


def plugin_of(stage: int, home: str, gas: int = 2) -> Any:
    from accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=gas,
        gradient_clipping=1.0,
        offload_optimizer_device="none" if home == "none" else "cpu",
        offload_param_device="cpu" if home == "param" else "none",
        zero3_init_flag=stage == 3,
        zero3_save_16bit_model=stage == 3,
    )


def loop(it: Any, steps: int = 12, old_contract: bool = False, with_scheduler: bool = True) -> dict[str, Any]:
    """A training loop as Accelerate's documentation has it."""
    from accelerate.utils import DummyOptim

    model = llama()
    in_file = "optimizer" in it.state.deepspeed_plugin.deepspeed_config
    optimizer = DummyOptim(model.parameters(), lr=1e-2) if in_file else torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = None
    if with_scheduler and not in_file:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(samples(), batch_size=2)
    wrapped = [thing for thing in (model, optimizer, loader, scheduler) if thing is not None]
    engine, optimizer, loader, *rest = it.prepare(*wrapped)
    if old_contract:
        it.deepspeed_engine_wrapped = OldWrapper(engine)
    losses, lrs, skipped = [], [], []
    for _, batch in zip(range(steps), loader, strict=False):
        with it.accumulate(engine):
            loss = engine(**batch).loss
            it.backward(loss)
            it.clip_grad_norm_(engine.parameters(), 1.0)
            optimizer.step()
            if rest:
                rest[0].step()
            optimizer.zero_grad()
        losses.append(loss.item())
        lrs.append(optimizer.param_groups[0]["lr"])
        skipped.append(optimizer.step_was_skipped)
    result = {
        "losses": losses,
        "lrs": lrs,
        "skipped": any(skipped),
        "engine": f"{type(engine).__module__}.{type(engine).__name__}",
        "unwrapped": it.unwrap_model(engine) is model,
        "steps": engine.global_steps,
        "dtype": str(next(model.parameters()).dtype),
        "weights": digest(model),
    }
    engine.destroy()
    return result


class OldWrapper:
    """What accelerate did before 1.2: `step()` after every backward, boundaries counted by the engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.engine.backward(loss, **kwargs)
        self.engine.step()

    def get_global_grad_norm(self) -> float:
        return self.engine.get_global_grad_norm()


def contracts() -> Any:
    results = {}
    for stage, home in CELLS:
        for old in (False, True):
            results[f"{stage} {home} {old}"] = loop(accelerator(plugin_of(stage, home)), old_contract=old)
    return results


def test_plugin_and_both_contracts() -> None:
    (results,) = frameworks.run(__file__, "contracts")
    assert len(results) == 2 * len(CELLS)
    assert len({json.dumps(row) for row in results.values()}) == 1, results
    row = results["2 cpu False"]
    assert row["engine"] == "pannier.engine.Engine" and row["unwrapped"] and row["steps"] == 6 and not row["skipped"]
    # The schedule writes into the groups that the engine reads: it is stepped once an update.
    assert row["lrs"][-1] == pytest.approx(1e-2 / 7)


def everyday(*paths: str) -> Any:
    from accelerate import DeepSpeedPlugin

    results = {}
    for path in paths:
        it = accelerator(DeepSpeedPlugin(hf_ds_config=path, gradient_accumulation_steps=2, gradient_clipping=1.0))
        results[pathlib.Path(path).name] = loop(it)
    return results


def test_everyday_files_train_as_they_are() -> None:
    paths = sorted(str(path) for path in EVERYDAY.glob("*.json"))
    (results,) = frameworks.run(__file__, "everyday", *paths)
    assert len(results) == len(paths) == 6
    for name, row in results.items():
        assert row["engine"] == "pannier.engine.Engine" and row["steps"] == 6, (name, row)
        assert row["dtype"] == ("torch.bfloat16" if "bf16" in name else "torch.float32")
        assert all(0 < loss < 6 for loss in row["losses"])
    whole = {row["weights"] for name, row in results.items() if "bf16" not in name}
    assert len(whole) == 1, results


SCRIPT = """
import json, os, sys
import torch
from accelerate import Accelerator, PartialState
from small_models import llama, samples

if int(os.environ["WORLD_SIZE"]) > 1:
    PartialState(backend="gloo")  # Without a GPU Accelerate takes each process for a world of its own.
it = Accelerator()
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(samples(32), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1])
engine, optimizer, loader = it.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = engine(**batch).loss
    it.backward(loss)
    optimizer.step()
    losses.append(loss.item())
import pannier
assert isinstance(engine, pannier.Engine), type(engine)
if it.is_main_process:
    print(json.dumps({"steps": engine.global_steps, "world": engine.world_size, "stage": engine.zero_optimization_stage()}))
"""


@pytest.mark.parametrize(("stage", "world", "method"), [(2, 1, "fork"), (3, 2, "spawn"), (2, 2, "forkserver")])
def test_launcher_with_a_configuration_file(tmp_path: pathlib.Path, stage: int, world: int, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"if __name__ == '__main__':\n{''.join('    ' + line + chr(10) for line in SCRIPT.splitlines())}")
    launcher = ["-m", "pannier.deepspeed", "-m", "accelerate.commands.launch"]
    options = ["--config_file", str(EVERYDAY / f"trl_zero{stage}.yaml"), "--num_processes", str(world)]
    options += ["--main_process_port", str(frameworks.ranks.free_port())]
    env = frameworks.environment(GLOO_SOCKET_IFNAME="lo")
    process = frameworks.start([*launcher, *options, str(script), method], env, tmp_path)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert found == {"steps": 16 // world, "world": world, "stage": stage}


PROGRAMS = {body.__name__: body for body in (contracts, everyday)}

if __name__ == "__main__":
    frameworks.main(PROGRAMS)
