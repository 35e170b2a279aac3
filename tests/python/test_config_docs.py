"""docs/config.md and the program agree on every key of the configuration: order, status and default."""
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
ROW = re.compile(r"\| `(?P<path>[\w.]+)` \| (?P<status>\w+) \| (?:`(?P<default>[^`]*)` )?\| (?P<meaning>.*?)\|$")


def documented() -> list[tuple[str, str, str]]:
    """The rows of the document's tables: path, status, default."""
    matches = map(ROW.match, (ROOT / "docs/config.md").read_text().splitlines())
    return [(row["path"], row["status"], row["default"] or "-") for row in matches if row]


def known() -> list[tuple[str, str, str]]:
    """The rows of the program's table."""
    libraries = os.environ.get("PANNIER_LIBRARY_DIR", str(ROOT / "build/dev/lib"))
    tool = pathlib.Path(libraries).parent / "bin/config_keys"
    lines = subprocess.run([tool], capture_output=True, text=True, check=True).stdout.splitlines()
    return [tuple(line.split("\t")) for line in lines]


def test_the_page_lists_every_key_as_it_is() -> None:
    assert documented() == known()


def test_every_key_has_a_meaning() -> None:
    rows = filter(None, map(ROW.match, (ROOT / "docs/config.md").read_text().splitlines()))
    assert not [row["path"] for row in rows if row["status"] != "alias" and not row["meaning"].strip()]


def test_the_page_lists_the_keys_people_write() -> None:
    paths = {path for path, _, _ in documented()}
    assert {"zero_optimization.stage", "fp16.enabled", "pannier.device_memory", "zero_optimization.cpu_offload"} <= paths
