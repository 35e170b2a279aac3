"""The layer check itself: an arrow that points up is found."""
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/check_layers.py"


def test_upward_include_fails(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "src/pannier/base"
    folder.mkdir(parents=True)
    (folder / "bad.h").write_text('#include "pannier/zero/reducer.h"\n#include <ATen/ATen.h>\n')
    result = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "base may not include zero" in result.stdout
    assert "base is below the torch line" in result.stdout
