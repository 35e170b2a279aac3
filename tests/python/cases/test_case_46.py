"""States on a disk: odd sizes and small buffers change no bit, and a disk that is full or cut short is an error."""

from __future__ import annotations

import os
import pathlib
import resource
from typing import Any

import pytest
import torch
from torch import nn

import pannier
import ranks
from case_models import OPT1, cfg, start

SIZES = (1, 3, 1023, 4097, 131073)


class Parts(nn.Module):
    """Parameters of odd sizes."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.sin(torch.arange(numel, dtype=torch.float32)) for numel in sizes)

    def forward(self, step: int) -> torch.Tensor:
        return sum((part * torch.cos(torch.arange(part.numel()) + step).to(part.dtype)).sum() for part in self.parts)


def engine_of(dev: str, folder: str, sizes: tuple[int, ...] = SIZES, stage: int = 3, **disk: Any) -> pannier.Engine:
    block = disk.pop("block_size", None)
    more = {} if block is None else {"aio": {"block_size": block}}
    config = cfg(stage=stage, dev="none", opt=OPT1, **more)
    config["zero_optimization"]["offload_optimizer"] = (
        {"device": "cpu"} if dev == "cpu" else {"device": "nvme", "nvme_path": folder, **disk}
    )
    return start(Parts(sizes), config)


def step(engine: pannier.Engine, number: int) -> None:
    engine.backward(engine(number))
    engine.step()


def masters(engine: pannier.Engine) -> list[torch.Tensor]:
    found = [pannier.safe_get_full_fp32_param(part) for part in engine.module.parts]
    found += [engine.optimizer.state[part][key] for part in engine.module.parts for key in ("exp_avg", "exp_avg_sq")]
    return found


def trained(dev: str, folder: str, **disk: Any) -> list[torch.Tensor]:
    engine = engine_of(dev, folder, **disk)
    for number in range(3):
        step(engine, number)
    found = masters(engine)
    engine.destroy()
    return found


def sizes_and_buffers(rank: int, world: int, folder: str) -> list[str]:
    """What differs from states in host memory; a buffer that is too small is said at `initialize`."""
    wrong = []
    folder = os.path.join(folder, f"disk of rank {rank}")  # Each machine has its own.
    os.makedirs(folder)
    for stage in (1, 3):
        want = trained("cpu", folder, stage=stage)
        for size in (16, 4096, 1e6):
            for count in (1, 2, 5):
                for block in (4096, 2**20) if count == 2 else (4096,):
                    disk = {"stage": stage, "buffer_size": size, "buffer_count": count, "block_size": block}
                    try:
                        have = trained("nvme", folder, **disk)
                    except pannier.ConfigError as error:
                        if size > 4096 or "offload_optimizer.buffer_size" not in str(error) or "at least" not in str(error):
                            wrong.append(f"{disk}: {error}")
                        continue
                    if not all(torch.equal(a, b) for a, b in zip(want, have, strict=True)):
                        wrong.append(f"{disk}: other bits")
    return wrong


def full(rank: int, world: int, folder: str) -> dict[str, Any]:
    """States of 4 MB on a disk that takes 256 KiB; then a model that fits."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, resource.RLIM_INFINITY))
    try:
        engine_of("nvme", folder, (350_000,))
    except OSError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    engine = engine_of("nvme", folder, (1023, 3))
    step(engine, 0)
    return {"said": said, "then": engine.global_steps}


def cut(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Somebody cuts the file between two steps."""
    engine = engine_of("nvme", folder, (350_000,), stage=2, buffer_count=1, buffer_size=2 * 4096 * 14)
    step(engine, 0)
    engine.synchronize()
    before = engine.module.parts[0].detach().clone()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.realpath(path).startswith(folder) and os.stat(path).st_size > 2**20:
            os.truncate(path, 4096)
    said = []
    for number in (1, 2):
        try:
            step(engine, number)
            engine.synchronize()
        except (OSError, RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said, "same": torch.equal(engine.module.parts[0].detach(), before)}


@pytest.mark.parametrize("world", [1, 2])
def test_sizes_and_buffers_change_no_bit(world: int, tmp_path: pathlib.Path) -> None:
    for ended in ranks.run(__file__, "sizes_and_buffers", world, str(tmp_path)):
        assert ended.result == []


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_is_named_on_every_rank(world: int, tmp_path: pathlib.Path) -> None:
    for ended in ranks.run(__file__, "full", world, str(tmp_path)):
        said = ended.result["said"]
        assert said.startswith("IoError") and str(tmp_path) in said, said
        assert ended.result["then"] == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("world", [1, 2])
def test_a_file_that_was_cut_is_an_error_not_a_step(world: int, tmp_path: pathlib.Path) -> None:
    for ended in ranks.run(__file__, "cut", world, str(tmp_path)):
        said = ended.result["said"]
        assert len(said) == 2 and said[0].startswith("IoError") and str(tmp_path) in said[0], ended.result


if __name__ == "__main__":
    ranks.main({body.__name__: body for body in (sizes_and_buffers, full, cut)})
