"""States on a disk: the same bits as at home in memory, each byte once each way, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import pannier
import ranks
from reference import DTYPES, OPTIMIZERS, Zoo, config, gradients

PROGRAMS: dict[str, ranks.Program] = {}
STEPS = 6
BUFFER = 2 * 4096 * 14  # Two chunks of one block, in the widest format.
State = dict[str, torch.Tensor]


def program(body: ranks.Program) -> ranks.Program:
    PROGRAMS[body.__name__] = body
    return body


def home(path: pathlib.Path | str | list[str], buffers: int = 1, size: int = BUFFER) -> dict[str, Any]:
    """An offload_optimizer section."""
    path = path if isinstance(path, list) else str(path)
    return {"device": "nvme", "nvme_path": path, "buffer_count": buffers, "buffer_size": size}


def resting(path: pathlib.Path | str, size: float = 8192, **keys: Any) -> dict[str, Any]:
    """Sections that let all parameters rest on the disk, two chunks of a block in memory."""
    param = {"device": "nvme", "nvme_path": str(path), "buffer_count": 1, "buffer_size": size, **keys}
    return {"offload_param": param, "stage3_param_persistence_threshold": 0}


def trained(
    rule: str, dtype: str, stage: int, gas: int, clipping: float, offload: dict[str, Any] | None, **sections: Any
) -> State:
    """Masters, parameters and states by name after the run."""
    model = Zoo()
    zero = {"reduce_bucket_size": 3000} | ({"offload_optimizer": offload} if offload else {})
    settings = config(
        OPTIMIZERS[rule][0], stage=stage, dtype=dtype, gas=gas, clipping=clipping,
        zero=zero | sections.pop("zero", {}), **sections,
    )  # fmt: skip
    engine, optimizer, _, _ = pannier.initialize(model=model, config=settings)
    rank, world = pannier.comm.get_rank(), pannier.comm.get_world_size()
    for step in range(STEPS):
        for micro in range(gas):
            engine.backward(engine(gradients(step, micro * world + rank, DTYPES[dtype])))
            engine.step()
    result = {}
    for name, param in model.named_parameters():
        master = pannier.safe_get_full_fp32_param(param)
        with pannier.zero.GatheredParameters([param] if master is None else []):  # A frozen one has no master.
            result[f"master.{name}"] = param.detach().float().clone() if master is None else master
        if stage < 3:
            result[f"param.{name}"] = param.detach().clone()
    for param, state in optimizer.state.items():
        name = next(name for name, other in model.named_parameters() if other is param)
        result.update({f"{key}.{name}": torch.as_tensor(value) for key, value in state.items()})
    engine.destroy()
    return result


def differing(left: State, right: State) -> list[str]:
    assert left.keys() == right.keys()
    return [key for key in left if not torch.equal(left[key], right[key])]


@pytest.mark.parametrize("gas", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["AdamW", "Nesterov", "Adagrad"])
def test_every_cell_has_the_bits_of_the_other_homes(rule: str, dtype: str, gas: int, tmp_path: pathlib.Path) -> None:
    for clipping in (0.0, 1.0):
        want = trained(rule, dtype, 2, gas, clipping, None)
        assert differing(want, trained(rule, dtype, 2, gas, clipping, {"device": "cpu"})) == []
        for stage in (1, 2, 3):
            got = trained(rule, dtype, stage, gas, clipping, home(tmp_path))
            assert [key for key in got if not torch.equal(got[key], want[key])] == [], f"stage {stage}, {clipping}"
    assert list(tmp_path.iterdir()) == []


def test_buffers_buckets_folders_and_host_memory_change_no_bit(tmp_path: pathlib.Path) -> None:
    want = trained("AdamW", "bf16", 2, 2, 1.0, None)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    for offload, sections in (
        (home(tmp_path, 5, 104857600), {}),
        (home(both), {}),
        (home(tmp_path), {"zero": {"reduce_bucket_size": 1}}),
        (home(tmp_path), {"zero": {"reduce_bucket_size": 1e9}}),
        (home(tmp_path), {"pannier": {"host_memory": 250_000}}),
        (home(tmp_path), {"pannier": {"host_memory": "1GiB"}}),
        (home(tmp_path), {"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1}}),
    ):
        assert differing(want, trained("AdamW", "bf16", 2, 2, 1.0, offload, **sections)) == [], (offload, sections)


def test_parameters_in_host_memory_and_states_on_disk(tmp_path: pathlib.Path) -> None:
    zero = {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 1}
    want = trained("AdamW", "bf16", 3, 2, 1.0, None)
    assert differing(want, trained("AdamW", "bf16", 3, 2, 1.0, home(tmp_path), zero=zero)) == []


def test_overlap_changes_no_bit(tmp_path: pathlib.Path) -> None:
    for dtype in DTYPES:
        want = trained("AdamW", dtype, 2, 2, 1.0, None)
        for stage in (2, 3):
            for zero in ({}, {"reduce_bucket_size": 1}, {"stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}):
                if stage == 2 and "offload_param" in zero:
                    continue
                overlap = {"zero": zero, "pannier": {"overlap_step": True, "stress_seed": 5}}
                got = trained("AdamW", dtype, stage, 2, 1.0, home(tmp_path), **overlap)
                assert [key for key in got if not torch.equal(got[key], want[key])] == [], (dtype, stage, zero)


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_on_the_device_change_no_bit(dtype: str, tmp_path: pathlib.Path) -> None:
    for rule in ("AdamW", "Nesterov", "Adagrad"):
        want = trained(rule, dtype, 2, 2, 1.0, None)
        for stage, share, zero in (
            (2, 1.0, {}),
            (2, 0.5, {"reduce_bucket_size": 1}),
            (3, 1.0, resting(tmp_path)),
            (3, 1.0, {"stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}),
        ):
            keys = {"zero": zero, "pannier": {"streamed_share": share, "stress_seed": 3}}
            got = trained(rule, dtype, stage, 2, 1.0, home(tmp_path), **keys)
            assert [key for key in got if not torch.equal(got[key], want[key])] == [], (rule, stage, share, zero)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_on_disk_change_no_bit(dtype: str, tmp_path: pathlib.Path) -> None:
    want = trained("AdamW", dtype, 3, 2, 1.0, None)
    disk = home(tmp_path)
    streamed = {"device": "cpu"}
    for offload, sections in (
        (None, {}),
        (disk, {}),
        ({"device": "cpu"}, {}),
        (streamed, {"pannier": {"streamed_share": 0.5}}),
        (disk, {"zero": {"reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 0}}),
        (disk, {"zero": resting(tmp_path, 1e8)}),
        (disk, {"zero": resting(tmp_path, max_in_cpu=3000)}),
    ):
        zero = resting(tmp_path) | sections.pop("zero", {})
        assert differing(want, trained("AdamW", dtype, 3, 2, 1.0, offload, zero=zero, **sections)) == [], (offload, sections)
    assert list(tmp_path.iterdir()) == []


class Tower(nn.Module):
    """Units that stage 3 tells apart, and a weight that is read outside of its module."""

    def __init__(self, width: int = 80, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return nn.functional.linear(x, self.embed.weight).logsumexp(-1).mean()


def tower(offload: dict[str, Any] | None, zero: dict[str, Any], **sections: Any) -> pannier.Engine:
    zero = {"reduce_bucket_size": 7000, "stage3_param_persistence_threshold": 0} | zero
    zero |= {"offload_optimizer": offload} if offload else {}
    settings = config(OPTIMIZERS["AdamW"][0], stage=3, dtype="bf16", zero=zero, **sections)
    return pannier.initialize(model=Tower(), config=settings)[0]


def batch(step: int) -> torch.Tensor:
    return torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(step))


def everything_done_with(engine: pannier.Engine, folder: str, loads: str | None) -> list[Any]:
    """What training, evaluation, edits, saving and loading give, as numbers."""
    model, seen = engine.module, []

    def train(steps: range) -> None:
        for index in steps:
            loss = engine(batch(index))
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())

    train(range(3))
    engine.eval()
    with torch.no_grad():
        seen.append(engine(batch(99)).item())
    engine.train()
    with pannier.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        seen.append(float(model.blocks[1].weight.float().sum()))
        model.blocks[2].weight.mul_(0.5)
    pannier.safe_set_full_fp32_param(model.blocks[0].bias, torch.full((80,), 0.25))
    train(range(3, 5))
    engine.save_checkpoint(folder)
    train(range(5, 7))
    engine.load_checkpoint(loads or folder)
    train(range(5, 7))
    seen += [float(pannier.safe_get_full_fp32_param(param).double().sum()) for param in model.parameters()]
    engine.save_16bit_model(folder)
    return seen


def test_everything_works_with_parameters_on_disk(tmp_path: pathlib.Path) -> None:
    disk, folders = tmp_path / "disk", [str(tmp_path / "a"), str(tmp_path / "b")]
    disk.mkdir()
    engine = tower(None, {})
    want = everything_done_with(engine, folders[0], None)
    engine.destroy()
    engine = tower(home(disk), resting(disk))
    have = everything_done_with(engine, folders[1], folders[0])
    stats, plan = engine.memory_stats(), engine.plan()
    assert have == want
    assert stats["nvme"]["by_owner"]["parameters"]["current"] >= 2 * 80 * 80 * 4
    assert plan["nvme"]["parameters"] == stats["nvme"]["by_owner"]["parameters"]["current"]
    assert plan["nvme"]["total"] == stats["nvme"]["current"]
    assert "parameters rest on the disk" in plan["text"]
    engine.destroy()
    weights = [next(pathlib.Path(folder).glob("*.safetensors")).read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    assert list(disk.iterdir()) == []


def parameters_on_device() -> int:
    """What models that other tests left behind hold."""
    gc.collect()
    held = json.loads(pannier.core.call(torch.ops.pannier.device_memory))["by_owner"]
    return int(held.get("parameters", {"current": 0})["current"])


def test_parameters_are_read_for_forward_and_backward_and_written_once(tmp_path: pathlib.Path) -> None:
    """With two buffers, and no more memory on host and device than the plan names."""
    numel, width, depth = 12 << 20, 512, 48

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).tanh()
            return x.float().sum()

    zero = resting(tmp_path, width * width) | {"stage3_prefetch_bucket_size": width * width}
    offload = home(tmp_path, 1, 1 << 20)
    settings = config(OPTIMIZERS["AdamW"][0], stage=3, dtype="bf16", zero=zero | {"offload_optimizer": offload})
    others = parameters_on_device()
    engine = pannier.initialize(model=Deep(), config=settings)[0]
    engine.reset_peak_memory()
    x = torch.ones(2, width, dtype=torch.bfloat16)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()
        engine.synchronize()

    step()
    before = engine.memory_stats()["nvme"]
    step()
    after = engine.memory_stats()["nvme"]
    state = 12 * numel
    assert after["written"] - before["written"] == pytest.approx(state + 2 * numel, rel=0.01)
    assert state + 3.5 * numel <= after["read"] - before["read"] <= 1.01 * (state + 4 * numel)
    stats, plan = engine.memory_stats(), engine.plan()
    assert stats["host"]["peak"] == pytest.approx(plan["host"]["total"], rel=0.03)
    assert plan["host"]["parameters"] == 0
    assert stats["device"]["by_owner"]["parameters"]["peak"] - others <= 1.03 * plan["device"]["parameters"] + (1 << 20)
    engine.destroy()


@program
def bits_over_ranks(rank: int, world: int, dtype: str, path: str) -> list[str]:
    """Which cells differ from states on the device; on every rank."""
    wrong = []
    for gas in (1, 2):
        want = trained("AdamW", dtype, 2, gas, 1.0, None)
        for stage in (1, 2, 3):
            got = trained("AdamW", dtype, stage, gas, 1.0, home(path))
            wrong += [f"stage {stage} {key}" for key in got if not torch.equal(got[key], want[key])]
        got = trained("AdamW", dtype, 2, gas, 1.0, home(path), pannier={"overlap_step": True})
        wrong += [f"overlap {key}" for key in got if not torch.equal(got[key], want[key])]
        got = trained("AdamW", dtype, 2, gas, 1.0, home(path), pannier={"streamed_share": 1.0})
        wrong += [f"streamed {key}" for key in got if not torch.equal(got[key], want[key])]
        for offload in (None, home(path)):
            got = trained("AdamW", dtype, 3, gas, 1.0, offload, zero=resting(path))
            wrong += [f"parameters on disk, {offload} {key}" for key in got if not torch.equal(got[key], want[key])]
    return wrong


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_two_ranks_have_the_bits_of_the_other_homes(dtype: str, tmp_path: pathlib.Path) -> None:
    for ended in ranks.run(__file__, "bits_over_ranks", 2, dtype, str(tmp_path)):
        assert ended.result == []
    assert list(tmp_path.iterdir()) == []


class Wide(nn.Module):
    """Many parameters, and a loss that costs little."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.linspace(-1, 1, numel // 4) for _ in range(4))

    def forward(self, factor: float) -> torch.Tensor:
        return sum((part.float() * factor).sum() for part in self.parts)


def wide(path: pathlib.Path, numel: int, offload: dict[str, Any], **sections: Any) -> pannier.Engine:
    settings = config(OPTIMIZERS["AdamW"][0], dtype="bf16", zero={"offload_optimizer": offload}, **sections)
    return pannier.initialize(model=Wide(numel), config=settings)[0]


def step(engine: pannier.Engine, factor: float = 0.5) -> None:
    engine.backward(engine(factor))
    engine.step()


def disk_bytes() -> tuple[int, int]:
    """What the kernel counts as read from and written to disks for this process."""
    lines = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def test_a_step_moves_24_bytes_a_parameter(tmp_path: pathlib.Path) -> None:
    numel = 4 << 20
    engine = wide(tmp_path, numel, home(tmp_path, 1, 2 * 4096 * 12))
    step(engine)
    engine.synchronize()
    before, counted = disk_bytes(), engine.memory_stats()["nvme"]
    for _ in range(3):
        step(engine)
        engine.synchronize()
    after, stats = disk_bytes(), engine.memory_stats()["nvme"]
    for index, what in enumerate(("read", "written")):
        moved = after[index] - before[index]
        assert moved == pytest.approx(3 * 12 * numel, rel=0.01), what
        assert stats[what] - counted[what] == pytest.approx(moved, rel=0.01), what
    assert stats["current"] == pytest.approx(12 * numel, rel=0.001)
    engine.destroy()


def test_host_memory_is_the_buffers_and_the_gradients(tmp_path: pathlib.Path) -> None:
    numel = 4 << 20
    engine = wide(tmp_path, numel, home(tmp_path, 4, 1 << 20))
    for _ in range(2):
        step(engine)
    host, plan = engine.memory_stats()["host"], engine.plan()
    assert host["by_owner"]["nvme staging"]["peak"] <= 4 << 20
    assert host["peak"] == pytest.approx((4 << 20) + 2 * numel, rel=0.03)
    assert host["peak"] == pytest.approx(plan["host"]["total"], rel=0.03)
    assert plan["nvme"]["total"] == engine.memory_stats()["nvme"]["current"]
    assert "nvme staging" in plan["text"] and "rest on the disk" in plan["text"]
    engine.destroy()


def test_host_memory_that_is_left_spares_the_disk(tmp_path: pathlib.Path) -> None:
    numel = 1 << 20
    offload = home(tmp_path, 1, 2 * 4096 * 12)
    engine = wide(tmp_path, numel, offload, pannier={"host_memory": 2 * numel + 8 * numel})
    file, plan = engine.memory_stats()["nvme"]["current"], engine.plan()
    assert file == pytest.approx(4 * numel, rel=0.1)
    assert plan["host"]["optimizer states"] == pytest.approx(8 * numel, rel=0.1)
    step(engine)
    engine.synchronize()
    assert engine.memory_stats()["host"]["peak"] <= 10 * numel
    before = engine.memory_stats()["nvme"]["written"]
    step(engine)
    engine.synchronize()
    assert engine.memory_stats()["nvme"]["written"] - before == pytest.approx(file, rel=0.01)
    engine.destroy()


def test_edits_and_states_that_are_set_count(tmp_path: pathlib.Path) -> None:
    results = []
    for offload in ({"device": "cpu"}, home(tmp_path)):
        model = Zoo()
        settings = config(OPTIMIZERS["AdamW"][0], dtype="bf16", zero={"offload_optimizer": offload})
        engine, _, _, _ = pannier.initialize(model=model, config=settings)
        for index in range(3):
            engine.backward(engine(gradients(index, 0, torch.bfloat16)))
            engine.step()
            with torch.no_grad():
                model.long[17:4500].mul_(0.5)
            pannier.safe_set_full_optimizer_state(model.long, torch.full((5001,), 0.25), "exp_avg")
            pannier.safe_set_full_fp32_param(model.matrix, torch.full((5, 7), 1 / 3))
        results.append({
            name: pannier.safe_get_full_fp32_param(param) for name, param in model.named_parameters() if param.requires_grad
        })  # fmt: skip
        engine.destroy()
    assert differing(*results) == []


def test_a_run_is_saved_and_goes_on_at_every_home(tmp_path: pathlib.Path) -> None:
    """Saved with states on a disk, loaded with them there and in host memory, trained on: the bits of one long run."""
    disk, saved = tmp_path / "disk", str(tmp_path / "saved")
    disk.mkdir()
    homes = [{"device": "cpu"}, home(disk)]

    def started(offload: dict[str, Any]) -> tuple[pannier.Engine, Zoo]:
        model = Zoo()
        settings = config(OPTIMIZERS["AdamW"][0], dtype="bf16", zero={"offload_optimizer": offload})
        return pannier.initialize(model=model, config=settings)[0], model

    def train(engine: pannier.Engine, steps: range) -> None:
        for index in steps:
            engine.backward(engine(gradients(index, 0, torch.bfloat16)))
            engine.step()

    def masters(engine: pannier.Engine, model: Zoo) -> State:
        result = {name: pannier.safe_get_full_fp32_param(param) for name, param in model.named_parameters() if param.requires_grad}
        engine.destroy()
        return result

    engine, model = started(homes[0])
    train(engine, range(6))
    want = masters(engine, model)
    engine, model = started(homes[1])
    train(engine, range(3))
    engine.save_checkpoint(saved)
    train(engine, range(3, 6))
    assert differing(want, masters(engine, model)) == []
    for offload in homes:
        engine, model = started(offload)
        engine.load_checkpoint(saved)
        train(engine, range(3, 6))
        assert differing(want, masters(engine, model)) == [], offload


@pytest.mark.parametrize("kind", ["missing", "file", "odd"])
def test_a_folder_that_cannot_be_used_is_named_and_nothing_changes(kind: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "states"
    if kind == "file":
        path.write_text("not a folder")
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    offload = home("/proc" if kind == "odd" else path)
    settings = config(OPTIMIZERS["AdamW"][0], dtype="bf16", zero={"offload_optimizer": offload})
    with pytest.raises(pannier.IoError, match="/proc" if kind == "odd" else str(path)) as caught:
        pannier.initialize(model=model, config=settings)
    assert isinstance(caught.value, OSError)
    assert model.weight.dtype == torch.float32 and torch.equal(model.weight, weight)


def test_a_buffer_too_small_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(pannier.ConfigError, match=r"offload_optimizer\.buffer_size.*at least 98304"):
        wide(tmp_path, 4096, home(tmp_path, 1, 98303))


def test_memory_is_no_disk(capfd: pytest.CaptureFixture[str]) -> None:
    engine = wide(pathlib.Path("/dev/shm"), 4096, home("/dev/shm"))
    step(engine)
    engine.destroy()
    assert "/dev/shm" in capfd.readouterr().err


def test_a_budget_that_does_not_hold_the_buffers_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(pannier.OutOfMemoryError, match="optimizer states"):
        wide(tmp_path, 4 << 20, home(tmp_path, 4, 4 << 20), pannier={"host_memory": "16MiB"})


@program
def train_on(rank: int, world: int, path: str, how: str) -> int:
    """Trains until somebody ends it; says when it has begun."""
    engine = wide(pathlib.Path(path), 1 << 20, home(path, 2, 1 << 20))
    step(engine)
    print("begun", flush=True)
    if how == "exception":
        raise RuntimeError("a mistake of the script's")
    for _ in range(10**9 if how == "for ever" else 2):
        step(engine)
    return 0


def begin(path: pathlib.Path, how: str = "for ever") -> subprocess.Popen[str]:
    """A run that has taken its first step."""
    process = subprocess.Popen(
        [sys.executable, __file__, "train_on", str(path), how],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # Ignored where tests run in the background.
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n", process.communicate()[1]
    return process


@pytest.mark.parametrize("how", ["end", "exception", "SIGINT", "SIGTERM"])
def test_nothing_is_left_in_the_folder(how: str, tmp_path: pathlib.Path) -> None:
    process = begin(tmp_path, "for ever" if how.startswith("SIG") else how)
    if how.startswith("SIG"):
        process.send_signal(getattr(signal, how))
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode == 0) == (how == "end")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_is_followed_by_another(tmp_path: pathlib.Path) -> None:
    for _ in range(3):
        process = begin(tmp_path)
        process.kill()
        process.communicate()
    engine = wide(tmp_path, 1 << 20, home(tmp_path))
    step(engine)
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


@program
def initialize_only(rank: int, world: int, path: str) -> str:
    """What a rank says when the folder is somebody else's."""
    try:
        wide(pathlib.Path(path), 1 << 16, home(path))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "began"


def test_ranks_are_refused_together(tmp_path: pathlib.Path) -> None:
    process = begin(tmp_path)
    try:
        for ended in ranks.run(__file__, "initialize_only", 2, str(tmp_path)):
            assert str(tmp_path) in ended.result and str(process.pid) in ended.result
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused_and_names_the_first(tmp_path: pathlib.Path) -> None:
    process = begin(tmp_path)
    try:
        with pytest.raises(pannier.IoError, match=f"(?s){tmp_path}.*{process.pid}"):
            wide(tmp_path, 4096, home(tmp_path))
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    ranks.main(PROGRAMS)
