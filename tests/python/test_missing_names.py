"""No release that the tests install uses a name under `deepspeed.` that is neither there nor known to be absent."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import frameworks

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "list_missing_names.py"


@pytest.mark.parametrize("which", ["pinned", "newest"])
def test_every_name_is_there_or_known_to_be_absent(which: str) -> None:
    packages = [f"{frameworks.folder(which)}/{name}" for name in ("transformers", "accelerate", "peft", "trl")]
    ended = subprocess.run([sys.executable, SCRIPT, *packages], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 of them unknown" in ended.stdout and "deepspeed.tp_model_init" in ended.stdout


def test_a_name_that_is_not_there_is_listed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "new.py").write_text("import deepspeed as ds\nds.zero.Init()\nds.brand_new.thing()\n")
    ended = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "UNKNOWN  deepspeed.brand_new.thing" in ended.stdout and "zero.Init" not in ended.stdout
