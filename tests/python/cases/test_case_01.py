"""Batch sizes that don't multiply out are refused with all the numbers; the rest are completed."""

import pytest
import torch

import pannier
from case_models import OPT1, Dot, cfg, start

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_config(train, micro, gas) -> dict:
    sizes = dict(zip(KEYS, (train, micro, gas), strict=True))
    return {
        **{key: value for key, value in sizes.items() if value is not None},
        "optimizer": OPT1,
        "zero_optimization": {"stage": 2},
    }


@pytest.mark.parametrize(
    ("train", "micro", "gas", "want"),
    [
        (8, 2, None, (8, 2, 4)),
        (None, 4, None, (4, 4, 1)),
        (8, None, 2, (8, 4, 2)),
        (None, 3, 4, (12, 3, 4)),
        (8, None, None, (8, 8, 1)),
    ],
)
def test_missing_sizes_are_completed(train, micro, gas, want) -> None:
    engine = start(Dot(), batch_config(train, micro, gas))
    assert (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ) == want
    assert engine.get_batch_info() == want
    assert tuple(engine.config[key] for key in KEYS) == want


@pytest.mark.parametrize(
    ("train", "micro", "gas", "parts"),
    [
        (8, 2, 1, [*KEYS, "8", "2", "1"]),
        (10, 4, None, [KEYS[0], KEYS[1], "10", "4"]),
        (None, None, 4, [KEYS[0], KEYS[1]]),
        (0, None, None, [KEYS[0], "0"]),
        (8, 1.5, None, [KEYS[1], "1.5"]),
        (-8, None, None, [KEYS[0], "-8"]),
        (True, None, None, [KEYS[0]]),
    ],
)
def test_impossible_sizes_are_refused(train, micro, gas, parts) -> None:
    model = Dot()
    before = model.w.data_ptr()
    with pytest.raises(pannier.ConfigError) as error:
        start(model, batch_config(train, micro, gas))
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert model.w.data_ptr() == before


def test_world_of_two_is_never_silently_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pannier.ConfigError, match="WORLD_SIZE is 2, but MASTER_ADDR.* is not set"):
        start(Dot(), batch_config(4, 1, None))


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1"}, "rank 2 is none of the 2 ranks"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, "WORLD_SIZE is 3, but MASTER_ADDR"),
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"}, "WORLD_SIZE is 3, but MASTER_ADDR"),
    ],
)
def test_what_starters_say_is_read(variables: dict[str, str], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # So that what is set meanwhile goes when the test ends.
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pannier.ConfigError, match=match):
        start(Dot(), batch_config(6, 1, None))


def test_a_slurm_allocation_without_a_step_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert start(Dot(), batch_config(4, 1, None)).world_size == 1


def test_setters_keep_the_product() -> None:
    engine = start(Dot(), batch_config(8, 2, None))
    engine.set_train_batch_size(2)
    assert engine.get_batch_info() == (2, 2, 1) and engine.is_gradient_accumulation_boundary()
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (3, 3, 1)
    for wrong in (4, 0, -3):
        with pytest.raises(pannier.ConfigError):
            engine.set_train_batch_size(wrong)
    with pytest.raises(pannier.ConfigError):
        engine.set_train_micro_batch_size(0)


def test_auto_micro_batch_is_that_of_the_first_batch() -> None:
    engine = start(Dot(), cfg(micro="auto", gas=2))
    engine.backward(engine(torch.ones(5)))
    assert engine.get_batch_info() == (10, 5, 2)
