"""Pannier's contestants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from gpu.trainer import Contestant, Setup, Trainer, engine_config, engine_step, on_disk

_CPU = {"device": "cpu", "pin_memory": True}


def contestants() -> dict[str, Contestant]:
    """By name."""
    offload = {"stage": 2, "offload_optimizer": _CPU}
    stage3 = {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU}
    overlap = {"overlap_step": True}
    return {
        "pannier-none": Contestant(_starter({"stage": 2}, {}), note="no offload"),
        "pannier": Contestant(_starter(offload, {})),
        "pannier-overlap": Contestant(_starter(offload, overlap), note="overlap_step"),
        "pannier-slack": Contestant(_starter(offload, {}), note="8 GiB above pannier's peak"),
        "pannier-zero3": Contestant(_starter(stage3, {}), model_on_host=True, note="parameters offloaded too"),
        "pannier-zero3-overlap": Contestant(_starter(stage3, overlap), model_on_host=True, note="and overlap_step"),
        "pannier-zero1-none": Contestant(_starter({"stage": 1}, {}), note="no offload"),
        "pannier-zero3-none": Contestant(_starter({"stage": 3}, {}), note="no offload"),
        "pannier-zero1-offload": Contestant(_starter({"stage": 1, "offload_optimizer": _CPU}, {})),
        "pannier-zero3-states": Contestant(_starter({"stage": 3, "offload_optimizer": _CPU}, {}), note="only states"),
        "pannier-nvme": Contestant(functools.partial(_start_on_disk, stage=2), note="states on the disk"),
        "pannier-zero3-nvme": Contestant(functools.partial(_start_on_disk, stage=3), note="states on the disk"),
    }


def _starter(zero: dict[str, Any], options: dict[str, Any]) -> Callable[[nn.Module, Setup], Trainer]:
    return functools.partial(_start, zero=zero, options=options)


def _start_on_disk(model: nn.Module, setup: Setup, *, stage: int) -> Trainer:
    return _start(model, setup, zero={"stage": stage, "offload_optimizer": on_disk(setup)}, options={})


def _start(model: nn.Module, setup: Setup, *, zero: dict[str, Any], options: dict[str, Any]) -> Trainer:
    import pannier  # noqa: PLC0415  (a contestant that is not there is a row with its reason)

    config = engine_config(setup, zero)
    section = dict(options)
    if setup.device_memory_nbytes is not None:
        section["device_memory"] = setup.device_memory_nbytes
    if setup.trace is not None:
        section["trace"] = str(setup.trace)
    if section:
        config["pannier"] = section
    engine, _, _, _ = pannier.initialize(model=model, config=config)

    def details() -> dict[str, Any]:
        return {
            "skipped_steps": engine.skipped_steps,
            "plan": str(engine.plan()),
            "memory": engine.memory_stats(),
        }

    return Trainer(functools.partial(engine_step, engine, setup), engine.synchronize, details, engine)
