"""Missing and torn checkpoints are named, and change nothing."""

import logging
import pathlib

import pytest

import pannier
from case_models import Dot, cfg, run, start, weight


def saved(folder: pathlib.Path, *tags: str) -> list[float]:
    engine = start(Dot((1.0, 2.0)), cfg())
    run(engine, [[1.0, 2.0]])
    for tag in tags:
        engine.save_checkpoint(folder, tag=tag)
    value = weight(engine)
    engine.destroy()
    return value


def test_empty_folder_loads_nothing_and_says_so(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Dot((1.0, 2.0)), cfg())
    with caplog.at_level(logging.WARNING, logger="pannier"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    assert str(tmp_path) in caplog.text


def test_without_latest_the_tags_are_said_and_none_is_guessed(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    want = saved(tmp_path, "one", "two")
    (tmp_path / "latest").unlink()
    engine = start(Dot((1.0, 2.0)), cfg())
    with caplog.at_level(logging.WARNING, logger="pannier"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    assert "one" in caplog.text and "two" in caplog.text and weight(engine) == [1.0, 2.0]
    assert engine.load_checkpoint(tmp_path, tag="one")[0] and weight(engine) == want


@pytest.mark.parametrize("how", ["asked for", "in latest"])
def test_absent_tag_is_an_error(tmp_path: pathlib.Path, how: str) -> None:
    saved(tmp_path, "one")
    if how == "in latest":
        (tmp_path / "latest").write_text("gone")
    engine = start(Dot((1.0, 2.0)), cfg())
    with pytest.raises((pannier.ConfigError, pannier.IoError)) as error:
        engine.load_checkpoint(tmp_path, tag="gone" if how == "asked for" else None)
    assert "gone" in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("part", [0.5, 0.0])
def test_torn_shard_is_named_and_changes_nothing(tmp_path: pathlib.Path, part: float) -> None:
    saved(tmp_path, "one")
    shard = max((path for path in (tmp_path / "one").rglob("*.safetensors")), key=lambda path: path.stat().st_size)
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.truncate(int(size * part))
    engine = start(Dot((1.0, 2.0)), cfg())
    with pytest.raises((pannier.ConfigError, pannier.IoError)) as error:
        engine.load_checkpoint(tmp_path)
    assert shard.name in str(error.value) and str(int(size * part)) in str(error.value), str(error.value)
    assert weight(engine) == [1.0, 2.0]
