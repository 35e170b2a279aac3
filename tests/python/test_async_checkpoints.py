"""Saves beside training: the bits of the moment at which they were called, whatever training does meanwhile."""

from __future__ import annotations

import json
import pathlib
import signal
from typing import Any

import pytest
import torch

import pannier
import ranks
from pannier import core
from test_checkpoints import PROGRAMS, noisy_engine, noisy_step, program, zoo_engine, zoo_step

ASYNC = {"checkpoint": {"async": True}}
SLOW = {"pannier": {"stress_seed": 11}}  # The thread that saves pauses before each chunk.


def tensors_of(folder: pathlib.Path | str, tag: str) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint has, each byte of it checked."""
    file = core.open_checkpoint(str(folder), tag)
    return {name: core.call(file.read, name) for name in core.call(file.names)}


def assert_same_tensors(folder: pathlib.Path | str, one: str, other: str) -> None:
    first, second = tensors_of(folder, one), tensors_of(folder, other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), second[name].view(-1).view(torch.uint8)), name


def nvme(path: pathlib.Path | str) -> dict[str, Any]:
    """Chunks of one block, so that there are several."""
    return {"device": "nvme", "nvme_path": str(path), "buffer_count": 2, "buffer_size": 2 * 4096 * 16}


@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        ("AdamW", "fp32", {"stage": 0}),
        ("AdamW", "bf16", {"stage": 2, "offload": True, "clipping": 1.0}),
        ("Adagrad", "fp16", {"stage": 2}),
        ("AdamW", "bf16", {"stage": 2, "offload": True, "pannier": {"overlap_step": True}}),
        ("Lion", "bf16", {"stage": 2, "offload": True, "pannier": {"streamed_share": 0.5}}),
        ("AdamW", "bf16", {"stage": 2, "zero": "nvme"}),
        ("AdamW", "fp32", {"stage": 2, "zero": "nvme"}),
        ("AdamW", "bf16", {"stage": 3, "offload": True, "zero": {"offload_param": {"device": "cpu"}}}),
        ("SGD", "fp16", {"stage": 3}),
    ],
)
def test_it_has_the_bits_of_its_moment(tmp_path: pathlib.Path, rule: str, dtype: str, options: dict[str, Any]) -> None:
    options = {"zero": {}, "pannier": {}, **options}
    if options["zero"] == "nvme":
        options["zero"] = {"offload_optimizer": nvme(tmp_path)}
    options["zero"] = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 0, **options["zero"]}
    engine = zoo_engine(rule, dtype, **options)
    for step in range(4):
        zoo_step(engine, step, dtype)
        engine.save_checkpoint(tmp_path, tag=f"alone{step}")
    engine.destroy()
    options["pannier"] = {**options["pannier"], **SLOW["pannier"]}
    engine = zoo_engine(rule, dtype, **options, **ASYNC)
    for step in range(4):  # Each save is under way in the next step.
        zoo_step(engine, step, dtype)
        engine.save_checkpoint(tmp_path, tag=f"beside{step}")
        with torch.no_grad():
            engine.module.count.add_(1)  # A buffer, which was copied.
    engine.finish_checkpoint()
    assert not engine.memory_stats()["checkpoint"]["is_being_written"]
    for step in range(4):
        with torch.no_grad():
            assert tensors_of(tmp_path, f"beside{step}")["model.count"].tolist() == [step + i for i in range(4)]
        first, second = tensors_of(tmp_path, f"alone{step}"), tensors_of(tmp_path, f"beside{step}")
        assert first.keys() == second.keys()
        for name in first.keys() - {"model.count"}:
            assert torch.equal(first[name], second[name]), (step, name)
    engine.destroy()
    assert (tmp_path / "latest").read_text() == "beside3"


@program
def beside(rank: int, world: int, folder: str, options: str) -> list[str]:
    """Saves of two ranks, alone and beside training, for each of several homes; then errors of one of them."""
    for number, chosen in enumerate(json.loads(options)):
        for kind, more in (("alone", {}), ("beside", {**ASYNC, **SLOW})):
            engine = noisy_engine(rank, **chosen, **more)
            for step in range(2):
                noisy_step(engine, rank, world, step)
                engine.save_checkpoint(folder, tag=f"{kind}{number}{step}")
            engine.destroy()
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = noisy_engine(rank, **ASYNC)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    engine.save_checkpoint(folder, tag="bad")
    message = ""
    for step in range(1000):  # At the same step on both ranks, or they would wait for each other.
        try:
            noisy_step(engine, rank, world, step)
        except pannier.IoError as error:
            message = f"{engine.global_steps} {error}"
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    engine.step()
    engine.save_checkpoint(folder, tag="good")
    engine.finish_checkpoint()
    return message.split(" ", 1)


def test_two_ranks_do_it_each_for_itself_and_rank_0_commits(tmp_path: pathlib.Path) -> None:
    homes = [
        {"zero": {"stage": 3}, "dtype": "bf16", "offload": True, "param_offload": True},
        {"zero": {"stage": 2, "offload_optimizer": nvme(tmp_path)}, "dtype": "bf16"},
    ]
    first, second = (ended.result for ended in ranks.run(__file__, "beside", 2, str(tmp_path), json.dumps(homes)))
    for number in range(len(homes)):
        for step in range(2):
            assert_same_tensors(tmp_path, f"alone{number}{step}", f"beside{number}{step}")
    assert first[0] == second[0]
    assert "rank 1: write " in first[1] and "File too large" in first[1]
    assert [path.name for path in (tmp_path / "bad").iterdir()] == []
    assert (tmp_path / "latest").read_text() == "good"


def test_an_error_is_told_by_the_next_call_and_the_old_one_stays(tmp_path: pathlib.Path) -> None:
    import resource

    engine = zoo_engine(**ASYNC)
    zoo_step(engine, 0, "bf16")
    engine.save_checkpoint(tmp_path, tag="one")
    engine.finish_checkpoint()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limit[1]))
    try:
        for call in (engine.finish_checkpoint, engine.save_checkpoint, engine.load_checkpoint):
            engine.save_checkpoint(tmp_path, tag="one")
            with pytest.raises(pannier.IoError, match="write .*File too large"):
                call(*([] if call == engine.finish_checkpoint else [tmp_path]))
        engine.save_checkpoint(tmp_path, tag="one")
        with pytest.raises(pannier.IoError, match="write .*File too large"):
            for step in range(1, 1000):
                zoo_step(engine, step, "bf16")
        engine.save_checkpoint(tmp_path, tag="one")
        engine.destroy()  # Says so in the log.
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    engine = zoo_engine(**ASYNC)
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 1


def test_whoever_writes_into_a_parameter_meanwhile_is_told_or_was_late(tmp_path: pathlib.Path) -> None:
    engine = zoo_engine(**ASYNC, **SLOW, zero={"reduce_bucket_size": 64})
    zoo_step(engine, 0, "bf16")
    engine.save_checkpoint(tmp_path, tag="before")
    engine.finish_checkpoint()
    engine.save_checkpoint(tmp_path, tag="edited")
    with torch.no_grad():
        engine.module.long.zero_()
    try:
        engine.finish_checkpoint()
    except pannier.ConfigError as error:
        assert "parameter long was written into while a checkpoint was being written" in str(error)
        assert not (tmp_path / "edited" / "manifest.json").exists()
    else:
        assert_same_tensors(tmp_path, "before", "edited")
    # Those who ask first are let wait.
    engine.save_checkpoint(tmp_path, tag="two")
    pannier.safe_set_full_fp32_param(engine.module.matrix, torch.zeros(5, 7))
    engine.finish_checkpoint()
    assert tensors_of(tmp_path, "two")["model.matrix"].abs().max() > 0


@pytest.mark.parametrize("on_disk", [False, True])
def test_its_memory_is_what_the_plan_says(tmp_path: pathlib.Path, on_disk: bool) -> None:
    home = {"zero": {"offload_optimizer": nvme(tmp_path)}} if on_disk else {"offload": True}
    engine = zoo_engine(**ASYNC, **home)
    for step in range(3):
        zoo_step(engine, step, "bf16")
        engine.save_checkpoint(tmp_path)
    engine.finish_checkpoint()
    planned, measured = engine.plan()["host"], engine.memory_stats()["host"]
    assert measured["by_owner"]["checkpoint"]["current"] == 0
    assert measured["by_owner"]["checkpoint"]["peak"] == planned["checkpoint"]
    assert measured["peak"] <= planned["total"]


class Level(torch.nn.Module):
    """Parameters whose elements are all the same after any step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.full((50_000,), 0.5) for _ in range(3))

    def forward(self) -> torch.Tensor:
        return torch.stack([part.float().sum() for part in self.parts]).sum()


def level_engine(folder: str, on_disk: bool) -> pannier.Engine:
    home = {"offload_optimizer": nvme(folder)} if on_disk else {}
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 60_000, **home},
        **ASYNC,
    }
    return pannier.initialize(model=Level(), config=config)[0]


@program
def train_and_save_for_ever(rank: int, world: int, folder: str, on_disk: str) -> None:
    engine = level_engine(folder, on_disk == "disk")
    print("ready", flush=True)
    for count in range(1, 100_000):
        engine.backward(engine())
        engine.step()
        engine.save_checkpoint(folder, tag=f"t{count % 3}", client_state={"count": count})


def test_killed_beside_training_the_last_one_loads(tmp_path: pathlib.Path) -> None:
    import os
    import random

    draw = random.Random(3)
    engine = level_engine(str(tmp_path), on_disk=False)
    for number in range(int(os.environ.get("PANNIER_KILLS", "2"))):
        where = ("memory", "disk")[number % 2]
        after = 0.3 + 0.3 * draw.random()
        ranks.run_and_kill(__file__, "train_and_save_for_ever", str(tmp_path), where, after=after)
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path is not None and engine.global_steps == client_state["count"]
        first = engine.module.parts[0]
        for part in engine.module.parts:
            assert set(part.flatten().tolist()) == {first[0].item()}
            moment = pannier.safe_get_full_optimizer_state(part, "exp_avg")
            assert len(moment.unique()) == 1
            assert moment[0].item() == pytest.approx(1 - 0.9 ** client_state["count"], rel=1e-4)


if __name__ == "__main__":
    ranks.main(PROGRAMS)
