"""A checkpoint loads with any number of ranks, at any stage, and the third step is the same everywhere."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import ranks
from case_models import Dot, cfg, start, weight
from pannier.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.1, "eps": 1.0, "weight_decay": 0.01}}
INPUTS = [[0.5 * k - 1 for k in range(7)], [1.0] * 7, [0.25 * k for k in range(7)]]
SAVED = [1.0453194, 2.0131366, 2.9631753, 3.9160862, 4.8900547, 5.8736906, 6.8623075]
AFTER = [1.0424457, 1.9945766, 2.9288185, 3.8695054, 4.8351645, 5.8130312, 6.7973728]
CELLS = [(0, "none"), (1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "param")]


def engine_of(stage: int, home: str) -> Any:
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
    if home == "param":
        zero["offload_param"] = {"device": "cpu"}
    dev = "none" if home == "none" else "cpu"
    return start(Dot([float(k) for k in range(1, 8)]), cfg(stage=stage, dev=dev, opt=OPTIMIZER, zero=zero))


def step(engine: Any, number: int) -> None:
    engine.backward(engine(torch.tensor(INPUTS[number])))
    engine.step()


def save(rank: int, world: int, folder: str) -> Any:
    found = []
    for stage, home in CELLS:
        engine = engine_of(stage, home)
        step(engine, 0)
        step(engine, 1)
        engine.save_checkpoint(f"{folder}/{stage}{home}")
        found.append(weight(engine))
        engine.destroy()
    return found


def load(rank: int, world: int, folder: str) -> Any:
    found = []
    others = {(0, "none"): (1, "cpu"), (2, "cpu"): (3, "none"), (3, "param"): (2, "none"), (3, "cpu"): (3, "cpu")}
    for saved, (stage, home) in others.items():
        engine = engine_of(stage, home)
        engine.load_checkpoint(f"{folder}/{saved[0]}{saved[1]}")
        before = weight(engine)
        step(engine, 2)
        found.append([before, weight(engine)])
        engine.destroy()
    return found


def test_any_number_of_ranks(tmp_path: pathlib.Path) -> None:
    for ended in ranks.run(__file__, "save", 2, str(tmp_path)):
        assert all(found == pytest.approx(SAVED, abs=1e-6) for found in ended.result)
    for folder in tmp_path.iterdir():
        exported = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        assert exported["w"].numel() == 7 and exported["w"].tolist() == pytest.approx(SAVED, abs=1e-6)
    for world in (1, 2, 3, 4):
        for ended in ranks.run(__file__, "load", world, str(tmp_path)):
            for before, after in ended.result:
                assert before == pytest.approx(SAVED, abs=1e-6) and after == pytest.approx(AFTER, abs=1e-6)


if __name__ == "__main__":
    ranks.main({"save": save, "load": load})
