"""What an engine on a GPU does around the step: where models come from, budgets, waits, and memory that runs out."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import pytest
import torch

import pannier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

WIDTH = 1024


def make_model(layers: int = 8, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).to(dtype)
    model.register_buffer("scale", torch.ones(WIDTH))
    model.register_buffer("tail", model.scale[WIDTH // 2 :])  # Of the same storage.
    return model


def make_engine(
    model: torch.nn.Module, home: str = "cpu", zero: dict[str, Any] | None = None, *, beside: bool = False, **ours: Any
) -> pannier.Engine:
    engine, _, _, _ = pannier.initialize(
        model=model,
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": WIDTH * WIDTH,
                "offload_optimizer": {"device": home},
                **(zero or {}),
            },
            "checkpoint": {"async": beside},
            "pannier": ours,
        },
    )
    return engine


def step(engine: pannier.Engine, batch: int = 4) -> None:
    x = torch.ones(batch, WIDTH, dtype=torch.bfloat16, device="cuda")
    engine.backward(engine(x).float().square().mean())
    engine.step()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().cpu().clone() for param in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_model_on_the_cpu_is_taken_to_the_gpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = make_model().to(device)
        engine = make_engine(model)
        assert engine.device.type == "cuda"
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
        for _ in range(3):
            step(engine)
        results.append(weights(model))
        engine.destroy()
    assert same(*results)


@pytest.mark.parametrize("home", ["none", "cpu"])
def test_parameters_in_host_memory_change_no_bit_and_take_less_of_the_gpu(home: str) -> None:
    results, resting = [], []
    for stage in (2, 3):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = make_model(layers=16)
        zero: dict[str, Any] = {"stage": stage}
        if stage == 3:
            zero |= {"offload_param": {"device": "cpu"}, "stage3_prefetch_bucket_size": 2 * WIDTH * WIDTH}
        engine = make_engine(model, home, zero)
        for _ in range(4):
            step(engine)
        resting.append(engine.memory_stats()["device"]["by_owner"]["parameters"]["current"])
        results.append([value.cpu() for value in model.state_dict().values()])
        engine.destroy()
        del engine, model
        gc.collect()
        assert torch.cuda.memory_allocated() <= before + 2**20
    assert same(*results)
    assert resting[1] <= resting[0] / 7, "the window, and a bucket that may still be on its way down"


@pytest.mark.parametrize("stage", [2, 3])
def test_states_on_a_disk_change_no_bit(stage: int, tmp_path: pathlib.Path) -> None:
    results = []
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2, "buffer_size": 2**20}
    for offload in ({"device": "cpu"}, disk):
        model = make_model()
        engine = make_engine(model, zero={"stage": stage, "offload_optimizer": offload})
        for _ in range(4):
            step(engine)
        results.append([value.cpu() for value in model.state_dict().values()])
        engine.destroy()
    assert same(*results)
    assert list(tmp_path.iterdir()) == []


def test_buffers_that_share_memory_share_it_on_the_gpu_too() -> None:
    model = make_model()
    make_engine(model)
    model.scale[WIDTH // 2] = 5
    assert model.tail[0].item() == 5


def test_a_model_comes_bucket_by_bucket() -> None:
    gc.collect()
    model = make_model(layers=16)
    nbytes = sum(param.nbytes for param in model.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(model)
    largest = 2 * WIDTH * WIDTH
    # The buckets, and of one parameter its values as they came, in fp32 and the rest that is split off.
    assert torch.cuda.max_memory_allocated() - before <= nbytes + 5 * largest
    engine.destroy()


def test_a_budget_too_small_is_refused_before_anything_moves() -> None:
    model = make_model()
    before = torch.cuda.memory_allocated()
    with pytest.raises(pannier.OutOfMemoryError, match="device"):
        make_engine(model, "none", device_memory="32MiB")
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(pannier.OutOfMemoryError, match="host"):
        make_engine(model, "cpu", host_memory="16MiB")
    assert {param.device.type for param in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_in_a_step_waits_for_the_whole_device(share: float, overlap: bool) -> None:
    engine = make_engine(make_model(), streamed_share=share, overlap_step=overlap)
    for _ in range(3):
        step(engine)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profiler:
        with torch.profiler.record_function("three steps"):
            for _ in range(3):
                step(engine)
    events = profiler.events()
    window = next(event.time_range for event in events if event.name == "three steps" and event.device_type.name == "CPU")
    inside = [event.name for event in events if window.start <= event.time_range.start <= window.end]
    assert any("cudaLaunchKernel" in name for name in inside), "the profiler saw no calls of the runtime"
    assert inside.count("cudaDeviceSynchronize") == 0
    # The calling thread reads one decision a step; without registered memory there would be one wait a copy.
    assert inside.count("cudaStreamSynchronize") <= 3
    engine.destroy()


def test_memory_that_runs_out_in_forward_changes_nothing() -> None:
    model = make_model()
    engine = make_engine(model, streamed_share=1.0)
    for _ in range(3):
        step(engine)
    engine.synchronize()
    before = weights(model)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step(engine, batch=1 << 20)
        assert same(before, weights(model))
        step(engine)
        engine.synchronize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    again = make_model()
    straight = make_engine(again, streamed_share=1.0)
    for _ in range(4):
        step(straight)
    straight.synchronize()
    assert same(weights(model), weights(again))


def test_a_profiler_sees_our_ranges(tmp_path: Any) -> None:
    path = tmp_path / "step.json"
    engine = make_engine(make_model(), trace=str(path), trace_step=3, streamed_share=0.5)
    for _ in range(4):
        step(engine)
    text = path.read_text()
    for name in ('"forward"', '"backward"', '"states ', "to the device", "to the host"):
        assert name in text
    engine.destroy()


def homes(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Sections of `zero_optimization` by what rests where."""
    disk = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2, "buffer_size": 2**20}
    cpu = {"device": "cpu"}
    ahead = {"stage": 3, "stage3_prefetch_bucket_size": 2 * WIDTH * WIDTH}
    return {
        "device": {"offload_optimizer": {"device": "none"}},
        "cpu": {"offload_optimizer": cpu},
        "nvme": {"offload_optimizer": disk},
        "parameters on cpu": {**ahead, "offload_optimizer": cpu, "offload_param": cpu},
        "parameters on nvme": {**ahead, "offload_optimizer": disk, "offload_param": disk},
        "all on the device": {**ahead, "offload_optimizer": {"device": "none"}},
    }


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.cpu() for value in model.state_dict().values()]


@pytest.mark.parametrize("home", list(homes(pathlib.Path())))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_goes_on_has_the_bits_of_one_never_stopped(
    home: str, overlap: bool, beside: bool, tmp_path: pathlib.Path
) -> None:
    zero = homes(tmp_path)[home]
    if overlap and home == "parameters on nvme":
        pytest.skip("refused")

    def engine_of() -> pannier.Engine:
        model = torch.nn.Sequential(make_model(), torch.nn.Dropout(0.1))
        return make_engine(model, zero=zero, beside=beside, overlap_step=overlap)

    torch.manual_seed(5)
    engine = engine_of()
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(str(tmp_path / "saved"), tag="one")
    for _ in range(3):
        step(engine)
    expected = values(engine.module)
    engine.destroy()
    torch.cuda.manual_seed(77)
    engine = engine_of()
    engine.load_checkpoint(str(tmp_path / "saved"), tag="one")
    for _ in range(3):
        step(engine)
    assert same(expected, values(engine.module))
    engine.destroy()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("home", [home for home in homes(pathlib.Path()) if home.startswith(("par", "all"))])
def test_frozen_parameters_in_shares_change_no_bit(home: str, tmp_path: pathlib.Path) -> None:
    results = []
    for zero in (homes(tmp_path)["cpu"], homes(tmp_path)[home]):
        model = make_model()
        for layer in list(model)[::2]:
            layer.requires_grad_(False)
        engine = make_engine(model, zero=zero)
        for _ in range(4):
            step(engine)
        results.append(values(engine.module))
        engine.destroy()
    assert same(*results)
