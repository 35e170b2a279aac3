"""The pannier program: its commands end well on real input, and say what is wrong with bad input."""

from __future__ import annotations

import array
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest

SMALL = ("--width", "32", "--heads", "4", "--layers", "1", "--feed-forward", "64", "--sequence", "8", "--vocabulary", "100")


def run(*arguments: str | pathlib.Path, code: int = 0, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    program = shutil.which("pannier")
    assert program is not None, "the pannier program is not on the path"
    command = [program, *map(str, arguments)]
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == code, f"{result.stdout}{result.stderr}"
    return result


@pytest.fixture(autouse=True)
def rates_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "ds_config.json"
    path.write_text("""{ // DeepSpeed's keys
      "train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
      "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}""")
    return path


@pytest.fixture
def tokens(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(array.array("H", [i % 10 for i in range(2000)]).tobytes())
    return path


def test_train_learns_and_writes_a_line_a_step(config: pathlib.Path, tokens: pathlib.Path, tmp_path: pathlib.Path) -> None:
    metrics = tmp_path / "run.jsonl"
    output = run("train", "--tokens", tokens, "--config", config, "--metrics", metrics, "--steps", "30", *SMALL).stdout
    assert "memory plan" in output and "step 30 loss" in output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[-1]["memory"]["host"]["by_owner"]["optimizer states"]["current"] > 0


def test_train_is_the_same_with_and_without_offload(config: pathlib.Path, tokens: pathlib.Path, tmp_path: pathlib.Path) -> None:
    losses = []
    for device in ("cpu", "none"):
        values = config.read_text().replace('"cpu"', f'"{device}"')
        (tmp_path / "other.json").write_text(values)
        run("train", "--tokens", tokens, "--config", tmp_path / "other.json", "--metrics", tmp_path / "m", "--steps", "5", *SMALL)
        losses.append([json.loads(line)["loss"] for line in (tmp_path / "m").read_text().splitlines()])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"--tokens": "/no/such/file"}, 1, "open tokens /no/such/file: No such file or directory"),
        ({"--config": "/no/such/file"}, 1, "/no/such/file"),
        ({"--metrics": "/no/such/folder/run"}, 1, "open metrics /no/such/folder/run: No such file or directory"),
        ({"--metrics": "/dev/full"}, 1, "write metrics /dev/full"),
        ({"--vocabulary": "5"}, 2, "holds token 5, but the vocabulary is 5"),
        ({"--sequence": "5000"}, 2, "holds 2000 tokens, but a window takes 5001"),
        ({"--heads": "5"}, 2, "--heads 5 must divide --width 32"),
        ({"--tokens": "/tmp"}, 1, "open tokens /tmp: Is a directory"),
        ({"--steps": "0"}, 2, "--steps"),
    ],
)
def test_train_says_what_is_wrong(
    config: pathlib.Path, tokens: pathlib.Path, change: dict[str, str], code: int, message: str
) -> None:
    flags = {"--tokens": tokens, "--config": config, "--steps": "1", **dict(zip(SMALL[0::2], SMALL[1::2], strict=True)), **change}
    result = run("train", *[part for flag in flags.items() for part in flag], code=code)
    assert message in result.stderr


def test_train_refuses_half_a_token(config: pathlib.Path, tmp_path: pathlib.Path) -> None:
    odd = tmp_path / "odd.bin"
    odd.write_bytes(bytes(2001))
    assert f"{odd} holds 2001 bytes" in run("train", "--tokens", odd, "--config", config, *SMALL, code=2).stderr


def test_train_needs_an_optimizer(tokens: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 1}')
    result = run("train", "--tokens", tokens, "--config", tmp_path / "c.json", *SMALL, code=2)
    assert "training needs an optimizer section" in result.stderr


@pytest.mark.parametrize("value", ["nan", "inf", "0", "0.5", "-1", "1e16"])
def test_plan_refuses_parameters_that_cannot_be(config: pathlib.Path, value: str) -> None:
    assert "--parameters" in run("plan", "--config", config, "--parameters", value, code=2).stderr


def test_plan_prints_and_refuses(config: pathlib.Path) -> None:
    assert "7000000000 parameters, fp32, stage 2" in run("plan", "--config", config, "--parameters", "7e9").stdout
    assert "95069488 parameters" in run("plan", "--config", config).stdout
    refused = run("plan", "--config", config, "--parameters", "7e9", "--vram", "10GiB", code=1)
    assert "Device out of memory. The plan needs 52.15 GiB" in refused.stderr
    assert "is not a size" in run("plan", "--config", config, "--ram", "plenty", code=2).stderr


MACHINE = ("--pcie", "55", "--dram", "140", "--cores-rate", "4.5", "--hbm", "4000")


@pytest.fixture
def bf16_config(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "bf16.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True},
                                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    return path


def test_plan_predicts_a_step_on_a_machine_that_is_not_there(bf16_config: pathlib.Path, rates_cache: pathlib.Path) -> None:
    rates_cache.mkdir(exist_ok=True)
    before = sorted(rates_cache.rglob("*"))
    arguments = ("plan", "--config", bf16_config, "--parameters", "1.54e9", *MACHINE)
    output = run(*arguments, "--forward-ms", "138", "--backward-ms", "360").stdout
    step = float(next(line.split()[1] for line in output.splitlines() if line.startswith("step ")))
    assert 0.58 < step < 0.60 and "given" in output and "probe" not in output
    assert sorted(rates_cache.rglob("*")) == before, "nothing is measured where all is given"
    hidden = run(*arguments, "--forward-ms", "138", "--backward-ms", "360", "--vram", "64GiB", "--activations", "30GiB").stdout
    assert float(next(line.split()[1] for line in hidden.splitlines() if line.startswith("step "))) < 0.53
    counted = run(*arguments, "--tokens", "16384", "--tflops", "405", "--recompute").stdout
    assert "forward                 0.125 s" in counted and "backward                0.374 s" in counted
    assert "times come after the first steps" in run(*arguments).stdout


def test_plan_measures_this_machine_once(config: pathlib.Path, rates_cache: pathlib.Path) -> None:
    first = run("plan", "--config", config, "--pcie", "25").stdout
    assert len(list(rates_cache.glob("pannier/hardware-*.json"))) == 1 and "streamed" in first
    assert "cache" in run("plan", "--config", config, "--pcie", "25").stdout
    without_link = run("plan", "--config", config).stdout
    assert "link up                         -  not known" in without_link and "100.0 %" in without_link


def test_plan_proposes_a_smaller_micro_batch(bf16_config: pathlib.Path) -> None:
    arguments = ("plan", "--config", bf16_config, "--parameters", "1e9", *MACHINE, "--activations", "8GiB")
    refused = run(*arguments, "--vram", "10GiB", code=1)
    assert "Nearest that fits: train_micro_batch_size_per_gpu 6 would need" in refused.stderr
    run(*arguments, "--vram", "12GiB")


@pytest.mark.parametrize("value", ["nan", "1e300"])
def test_plan_refuses_rates_that_cannot_be(config: pathlib.Path, value: str) -> None:
    assert "must be" in run("plan", "--config", config, "--pcie", value, code=2).stderr


def test_plan_needs_an_optimizer(tmp_path: pathlib.Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 1}')
    assert "needs an optimizer section" in run("plan", "--config", tmp_path / "c.json", code=2).stderr


def test_doctor_and_bench() -> None:
    assert "update kernels" in run("doctor").stdout
    line = run("bench", "update", "--parameters", "2000000", "--repeats", "1").stdout
    assert re.search(r"[1-9]\d* % of this machine's copy rate of [\d.]+ GB/s", line), line
    text = run("bench", "link", "--mebibytes", "4", "--repeats", "1").stdout
    assert len(re.findall(r"[1-9][\d.]* GB/s", text)) == 3, text
    text = run("bench", "step", "--steps", "2", "--batch", "2", *SMALL).stdout
    assert re.search(r"states on the host: .*\d % of the speed\n  host to device +[\d.]+ \w+ a step", text), text


@pytest.mark.parametrize("arguments", [(), ("--threads",)])
def test_bench_of_a_disk(arguments: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    text = run("bench", "nvme", tmp_path, "--mebibytes", "4", "--seconds", "0.01", "--repeats", "1", *arguments).stdout
    assert len(re.findall(r"^(?:read|write|read and write) +[\d.]+ GB/s, .*fio", text, re.MULTILINE)) == 3, text
    assert list(tmp_path.iterdir()) == []


def test_doctor_looks_at_a_disk(tmp_path: pathlib.Path) -> None:
    text = run("doctor", "--nvme", tmp_path).stdout
    assert re.search(r"nvme path +\S+, \w+, [\d.]+ \w+ of [\d.]+ \w+ free", text), text
    assert re.search(r"wear +up to [\d.]+ TB written a day", text), text
    assert list(tmp_path.iterdir()) == []
    memory = run("doctor", "--nvme", "/dev/shm").stdout
    assert re.search(r"-> .*/dev/shm.*memory", memory), memory


@pytest.mark.parametrize("command", [("doctor", "--nvme"), ("bench", "nvme")])
def test_a_disk_that_is_not_there(command: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file"):
        assert str(path) in run(*command, path, code=1).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("plan", "--config", "CONFIG"),
        ("doctor",),
        ("bench", "update", "--parameters", "1000", "--repeats", "1"),
        ("train", "--config", "CONFIG", "--tokens", "TOKENS", "--steps", "1", *SMALL),
        ("train", "--config", "CONFIG", "--tokens", "TOKENS", "--steps", "200", *SMALL),
    ],
)
def test_output_that_cannot_be_written_is_a_failure(
    arguments: tuple[str, ...], config: pathlib.Path, tokens: pathlib.Path
) -> None:
    paths = {"CONFIG": config, "TOKENS": tokens}
    with open("/dev/full", "w") as full:
        result = run(*(paths.get(argument, argument) for argument in arguments), code=1, stdout=full)
    assert result.stderr.splitlines()[-1] == "pannier: write standard output: No space left on device"


@pytest.mark.parametrize(
    "arguments", [(), ("fly",), ("plan",), ("plan", "--confg", "c.json"), ("bench",), ("bench", "link", "--repeats", "0"), ("doctor", "more")]
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert "--help" in run(*arguments, code=2).stderr


def test_help_says_what_the_exit_status_means() -> None:
    text = run("--help").stdout
    assert [line.split()[0] for line in text[text.index("Exit status:") :].splitlines()[1:4]] == ["0", "1", "2"]


def test_help_has_examples() -> None:
    assert "train" in run("--help").stdout
    for command in ("train", "plan", "bench"):
        assert "pannier " + command in run(command, "--help").stdout
    assert run("--version").stdout.strip() == "0.1.0"
