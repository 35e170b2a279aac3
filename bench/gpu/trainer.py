"""What a contestant is: a function that makes a `Trainer` of a model."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu import training_models
from gpu.works import Work

CLIP = 1.0


def _nothing() -> None:
    pass


def num_ranks() -> int:
    """How many processes train together; 1 where nobody started more."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all contestants of a work are given."""

    work: Work
    device: torch.device
    device_memory_nbytes: int | None = None  # A budget, for those who take one.
    disk: pathlib.Path | None = None  # A folder, for those who keep states on a disk.
    trace: pathlib.Path | None = None  # Where Pannier writes a trace of one step.

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.work.precision == "bf16" else torch.float16

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return training_models.loss_of(self.work, model, *batch)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A contestant at work."""

    step: Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]  # A whole step; returns the loss, unread.
    finish: Callable[[], None] = _nothing  # Waits for what `step` left running.
    details: Callable[[], dict[str, Any]] = dict  # For the JSON only.
    engine: Any = None  # What saves and loads checkpoints, where it is an engine.


@dataclasses.dataclass(frozen=True)
class Contestant:
    """How a contestant starts. `note` says what a reader of its row must know."""

    start: Callable[[nn.Module, Setup], Trainer]
    model_on_host: bool = False  # It is given its model in host memory, and moves it itself.
    note: str = ""


def engine_config(setup: Setup, zero: dict[str, Any]) -> dict[str, Any]:
    """The configuration that Pannier and DeepSpeed are both given."""
    params = {"lr": setup.work.learning_rate, "weight_decay": setup.work.weight_decay}
    return {
        "train_micro_batch_size_per_gpu": setup.work.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": params},
        setup.work.precision: {"enabled": True},
        "zero_optimization": zero,
    }


def on_disk(setup: Setup) -> dict[str, Any]:
    """The section of states that rest on a disk, for Pannier and DeepSpeed. Raises ValueError where no folder is given."""
    if setup.disk is None:
        raise ValueError("states on a disk need a folder: give one with --disk")
    return {"device": "nvme", "nvme_path": str(setup.disk), "pin_memory": True, "buffer_count": 5}


def engine_step(engine: Any, setup: Setup, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A step as both engines' users write it."""
    loss = setup.loss(engine, batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()
