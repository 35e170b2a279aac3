"""The examples run, and say what their pages claim. Models and steps are few here; `./dev demo` runs the real thing."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import frameworks
import pannier

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES / "demo"))


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs Python with `command`; fails with its whole output unless it ends well."""
    result = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, cwd=cwd, env=os.environ
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def merged_fragment(device_path: pathlib.Path) -> str:
    """The first seed's configuration with its NVMe fragment, comments and all, in the place of offload_optimizer."""
    whole = (EXAMPLES / "first_seed/ds_config.json").read_text()
    fragment = (EXAMPLES / "first_seed/ds_config_nvme_fragment.jsonc").read_text().rstrip()
    merged, count = re.subn(r'"offload_optimizer": \{.*?\}', lambda _: fragment, whole, flags=re.DOTALL)
    assert count == 1
    return merged.replace("/path/to/nvme_cache", str(device_path)).replace('"auto"', "8")


def test_script_for_deepspeed_runs_unchanged(tmp_path: pathlib.Path) -> None:
    text = (EXAMPLES / "seed_script.py").read_text()
    # The same script with a smaller model and fewer tokens: an fp16 step of the full one takes minutes on a CPU.
    for full, small in (("30000", "300"), ("1024", "64"), ("seq_len = 128", "seq_len = 8")):
        assert full in text
        text = text.replace(full, small)
    text = text.replace("64**3", "1024**3")
    script = tmp_path / "seed_script.py"
    script.write_text(text)
    output = run("-m", "pannier.deepspeed", script, cwd=tmp_path).stdout
    losses = [float(loss) for loss in re.findall(r"^step \d+, loss=([\d.]+)$", output, flags=re.MULTILINE)]
    assert len(losses) == 4
    assert all(abs(loss - 5.7) < 1.5 for loss in losses), "random labels of 300 kinds: about ln 300"
    assert re.search(r"^peak device memory: \d+\.\d\d GB$", output, flags=re.MULTILINE)


def block(mark: str) -> str:
    """The block of README under a mark."""
    return (ROOT / "README.md").read_text().split(f"<!-- trainer: {mark} -->\n```\n", 1)[1].split("```", 1)[0]


def test_trainer_of_the_readme(tmp_path: pathlib.Path) -> None:
    commands = block("commands").replace("\\\n", "").splitlines()
    assert len(commands) == 4 and (ROOT / "scripts/frameworks-pinned.txt").exists()
    words = commands[-1].removeprefix("./dev run python ").replace("--output_dir out", f"--output_dir {tmp_path}").split()
    result = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT, env=frameworks.environment()
    )
    assert result.returncode == 0, result.stdout + result.stderr
    numbers = re.compile(r"\d+\.\d+")
    have, want = ("\n".join(text.strip().splitlines()[-3:]) for text in (result.stdout, block("output")))
    assert numbers.sub("#", have) == numbers.sub("#", want)
    for mine, said in zip(numbers.findall(have), numbers.findall(want), strict=True):
        assert float(mine) == pytest.approx(float(said), abs=0.05)


def test_configuration_from_the_web_is_accepted_with_a_line_for_each_odd_key() -> None:
    result = run(EXAMPLES / "first_seed/train.py", "--steps", "3")
    assert "batch size 8, skipped steps 0" in result.stdout
    for key in (
        "stage3_prefetch_size",
        "stage3_max_live_params",
        "stage3_max_unused_params",
        "contiguous_gradients",
        "sub_group_size",
    ):
        assert key in result.stderr


def test_nvme_fragment_trains_as_written(tmp_path: pathlib.Path) -> None:
    import torch

    path = tmp_path / "ds_config.jsonc"
    cache = tmp_path / "nvme_cache"
    cache.mkdir()
    path.write_text(merged_fragment(cache))
    model = torch.nn.Linear(4, 4)
    engine, _, _, _ = pannier.initialize(model=model, model_parameters=model.parameters(), config=str(path))
    before = model.weight.detach().clone() if model.weight.numel() else None
    for _ in range(2):
        engine.backward(engine(torch.ones(8, 4, device=engine.device, dtype=torch.float16)).float().sum())
        engine.step()
    assert engine.memory_stats()["nvme"]["current"] > 0
    assert before is None or not torch.equal(model.weight, before) or engine.skipped_steps == 2
    engine.destroy()
    assert list(cache.iterdir()) == []


def test_demo_holds_its_promises_with_a_small_model(tmp_path: pathlib.Path) -> None:
    output = run(
        EXAMPLES / "demo/demo.py",
        "--reduced",
        "--steps",
        "8",
        "--sequence",
        "16",
        "--out",
        tmp_path,
        "--data",
        ROOT / ".demo",
    ).stdout
    assert "FAILED" not in output
    assert output.count("ok    ") == 5
    assert "out of memory" in output
    assert (tmp_path / "table.md").read_text().count("out of memory") == 1
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_demo_model_is_the_size_that_it_says() -> None:
    import torch

    import model

    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model.BigModel().parameters()) == model.NUM_PARAMETERS


def test_batches_depend_on_nothing_but_the_seed() -> None:
    import torch

    import data

    text = data.prepare(ROOT / ".demo")
    assert text["vocabulary"] == 30_000
    tokens = pathlib.Path(text["tokens"])
    once, again = (list(itertools.islice(data.batches(tokens, 8, 16), 3)) for _ in range(2))
    assert all(
        torch.equal(a, b) for first, second in zip(once, again, strict=True) for a, b in zip(first, second, strict=True)
    )
    inputs, labels = once[0]
    assert inputs.shape == (8, 16) and labels.shape == (8,)
    assert int(inputs.max()) < 30_000


def test_plots_are_drawn_from_json_lines(tmp_path: pathlib.Path) -> None:
    lines = tmp_path / "metrics.jsonl"
    lines.write_text("".join(json.dumps({"step": step, "loss": 10.0 - step}) + "\n" for step in range(1, 6)))
    run(ROOT / "scripts/plot_run.py", lines, "--out", tmp_path)
    assert (tmp_path / "loss.png").stat().st_size > 5_000
    assert not (tmp_path / "memory.png").exists()


def test_python_lines_of_the_readme_run(tmp_path: pathlib.Path) -> None:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert found is not None
    script = tmp_path / "readme.py"
    script.write_text(found[1])
    assert "loss" in run(script, cwd=tmp_path).stdout
