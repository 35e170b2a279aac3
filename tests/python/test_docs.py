"""The examples of the pages for people who come from DeepSpeed run, and print what the pages say."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ("migrate.md", "troubleshooting.md", "memory.md")
EXAMPLE = re.compile(r"<!-- run: (\w+) -->\n```(\w+)\n(.*?)```", re.DOTALL)
OUTPUT = re.compile(r"<!-- output: (\w+) -->\n```\n(.*?)```", re.DOTALL)
SAYS = {
    "script": "pannier.engine trained: loss 0.",
    "install": "0.19.6+pannier pannier.engine",
    "loop": "True",
    "doctor": "core",
    "plan": "optimizer states",
    "estimate": "127.45 GiB |",
    "measure": "bytes a parameter",
}


def examples() -> dict[str, tuple[str, str, str]]:
    """By name: page, language and text."""
    found = {}
    for page in PAGES:
        for name, language, text in EXAMPLE.findall((ROOT / "docs" / page).read_text()):
            found[name] = (page, language, text)
    return found


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(name: str, tmp_path: pathlib.Path) -> None:
    page, language, text = examples()[name]
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    start = ["-m", "pannier.deepspeed"] if name == "script" else []
    command = ["sh", str(script)] if language == "sh" else [sys.executable, *start, str(script)]
    libraries = os.environ.get("PANNIER_LIBRARY_DIR", str(ROOT / "build/dev/lib"))
    path = os.pathsep.join([str(pathlib.Path(libraries).parent / "bin"), os.environ["PATH"]])
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert SAYS[name] in ended.stdout, ended.stdout
    printed = dict(OUTPUT.findall((ROOT / "docs" / page).read_text()))
    assert printed.get(name, ended.stdout) == ended.stdout


def test_every_example_is_run() -> None:
    assert examples().keys() == SAYS.keys()


def test_versions_are_those_that_tests_install() -> None:
    text = (ROOT / "docs/migrate.md").read_text()
    for which in ("pinned", "newest"):
        wanted = dict(line.split("==") for line in (ROOT / f"scripts/frameworks-{which}.txt").read_text().split())
        assert all(wanted[name] in text for name in ("transformers", "accelerate", "peft", "trl"))
