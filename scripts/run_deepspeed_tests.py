#!/usr/bin/env python3
"""Runs DeepSpeed's own unit tests, unchanged, on Pannier: ./dev deepspeed-tests SOURCE_TREE

SOURCE_TREE is a checkout of DeepSpeed 0.19.6 (its source package on PyPI has no tests). The tests are copied out of it,
so that its package is not found, and run on the CPU through `python -m pannier.deepspeed`. What passed, failed and was
skipped is listed by file, with the reasons. `--page` writes that into docs/deepspeed-tests.md, between its marks, and
`--from` reads results of earlier runs instead of running.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

# The files that need no more than DeepSpeed's public interface.
FILES = """
runtime/zero/test_ignore_unused_parameters.py
runtime/zero/test_zero_dynamic_class.py
runtime/zero/test_zero_hook_attribute_delegation.py
runtime/zero/test_zero_nesting_init.py
runtime/zero/test_zero_offloadpp.py
runtime/zero/test_zero_tensor_fragment.py
runtime/half_precision/test_dynamic_loss_scale.py
runtime/half_precision/test_fp16.py
runtime/half_precision/test_zero_optim_overflow.py
runtime/zenflow/test_zf.py
runtime/test_autocast.py
runtime/test_data.py
runtime/test_ds_config_dict.py
runtime/test_ds_initialize.py
runtime/test_lr_schedulers.py
runtime/test_multi_output_model.py
runtime/test_no_sync_ctxt.py
ops/adam/test_cpu_adam.py
ops/adam/test_hybrid_adam.py
ops/adagrad/test_cpu_adagrad.py
ops/lion/test_cpu_lion.py
ops/muon/test_muon.py
ops/muon/test_muon_partial_training.py
checkpoint/test_convert_checkpoint.py
checkpoint/test_latest_checkpoint.py
checkpoint/test_shared_weights.py
checkpoint/test_tag_validation.py
utils/test_get_optim_files.py
v1/zero/test_zero.py
v1/zero/test_zero2_offload_multi_backward.py
v1/zero/test_zero_coalesce_grad_reduction.py
v1/zero/test_zero_hook_count_regression.py
v1/zero/test_zero_torch_func.py
v1/zero/test_zero_user_backward.py
v1/nvme/test_aio.py
v1/nvme/test_aio_gil.py
v1/half_precision/test_bf16.py
v1/half_precision/test_gradient_clipping_default.py
v1/half_precision/test_with_autocast.py
""".split()


# Tests name GPUs by number where they build torch's DistributedDataParallel to compare with; on the CPU it takes none.
# Ranks start as new processes, which import this.
ON_THE_CPU = """
import torch.nn.parallel.distributed as distributed

def initialize(self, module, device_ids=None, output_device=None, *arguments, _real=distributed.DistributedDataParallel.__init__, **more):
    _real(self, module, None, None, *arguments, **more)

distributed.DistributedDataParallel.__init__ = initialize
"""

# pytest.raises() that sees no error raises what is no Exception, which would end a rank's process without a word and have
# the test wait for it.
SAY_WHAT_FAILED = """
import functools
import multiprocessing.pool as pool

@functools.wraps(pool.starmapstar)
def starmapstar(arguments, _real=pool.starmapstar):
    try:
        return _real(arguments)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise AssertionError(str(error)) from None

pool.starmapstar = starmapstar
"""

# Each rank of each test is a process of its own. They are forked from one that has imported this, since importing torch
# takes longer than most tests. Ranks draw different random numbers from numpy, as if each had imported it.
PRELOAD = """
import gc, os
import numpy, torch, deepspeed, unit.simple_model

gc.freeze()
os.register_at_fork(after_in_child=numpy.random.seed)
"""

ANSI = re.compile(r"\x1b\[[0-9;]*m")
HUNG = "hung"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
QUIET = 240.0  # Seconds; a rank that dies leaves torch's and multiprocessing's waits behind that never end.


@dataclasses.dataclass
class Result:
    """One test."""

    file: str
    name: str
    outcome: str
    reason: str = ""


# A plugin of pytest's. It keeps a few cases of each test function and leaves out those that ran before, and writes a line
# when a test begins and one when it ends: a test that hangs takes its process with it, and what ended before it counts.
PLUGIN = """
import collections, json, multiprocessing, os
import pytest

LOG = os.environ["PANNIER_TEST_LOG"]

def write(**row):
    with open(LOG, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\\n")

def pytest_configure(config):
    multiprocessing.set_forkserver_preload(["pannier_preload"])

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    limit = int(os.environ["PANNIER_SAMPLE"])
    with open(LOG, encoding="utf-8") as file:
        before = {json.loads(line)["test"] for line in file}
    seen = collections.Counter()
    kept = []
    for item in items:
        key = item.nodeid.partition("[")[0]
        seen[key] += 1
        if (not limit or seen[key] <= limit) and item.nodeid not in before:
            kept.append(item)
    items[:] = kept

def pytest_runtest_logstart(nodeid, location):
    write(test=nodeid)

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "longreprtext", "")
        write(test=report.nodeid, outcome=report.outcome, text=text)

def pytest_collectreport(report):
    if report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "longreprtext", "")
        write(test=report.nodeid, outcome=report.outcome, text=text)
"""


def run_files(tests: pathlib.Path, files: list[str], limit: float, select: str, sample: int) -> list[Result]:
    """The results of some files. Where a test hangs, the rest runs without it."""
    log = tests.parent / "log.jsonl"
    log.write_text("")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": "120",
        "LOCAL_SIZE": "4",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PANNIER_SAMPLE": str(sample),
        "PANNIER_TEST_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(
            [str(tests), os.environ.get("PANNIER_FRAMEWORKS_PINNED", ""), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-m", "pannier.deepspeed", "-m", "pytest", *[f"unit/{file}" for file in files]]
    command += ["-p", "no:cacheprovider", "-p", "pannier_plugin", "--continue-on-collection-errors"]
    command += ["-k", select] if select else []
    until = time.monotonic() + limit * len(files)
    while True:
        before = len(log.read_text().splitlines())
        ended = run_pytest(command, tests, environment, until - time.monotonic())
        results = read_log(files, log, ended)
        began = len(log.read_text().splitlines()) > before
        if ended is None or not began or not any(row.outcome == HUNG for row in results):
            return [dataclasses.replace(row, outcome="failed") if row.outcome == HUNG else row for row in results]
        for row in results:  # It counts as failed from now on.
            if row.outcome == HUNG:
                line = {"test": f"unit/{row.file}::{row.name}", "outcome": "failed", "text": row.reason}
                with open(log, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def run_pytest(command: list[str], tests: pathlib.Path, environment: dict[str, str], limit: float) -> int | None:
    """pytest's exit code, None where it took too long. A test that says nothing for long is ended with its process."""
    log, until = pathlib.Path(environment["PANNIER_TEST_LOG"]), time.monotonic() + max(1.0, limit)
    with open(tests.parent / "output.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=tests, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        began = time.time()
        while True:
            try:
                return process.wait(5)
            except subprocess.TimeoutExpired:
                is_late = time.monotonic() > until
                if is_late or time.time() - max(began, log.stat().st_mtime) > QUIET:
                    os.killpg(process.pid, 9)
                    code = process.wait()
                    return None if is_late else code


def read_log(files: list[str], log: pathlib.Path, ended: int | None) -> list[Result]:
    """What the plugin wrote down, the last word on each test; one that only began hung."""
    rows: dict[str, Result] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        path, _, name = row["test"].partition("::")
        file = path.removeprefix("unit/")
        if "outcome" in row:
            rows[row["test"]] = Result(file, name or "(whole file)", row["outcome"], reason_of(row["text"]))
        else:
            rows.setdefault(row["test"], Result(file, name, HUNG, "did not end: ranks wait"))
    if not rows:
        tail = (log.parent / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
        return [Result(files[0], "(whole file)", "failed", f"pytest ended with {ended}: {' '.join(tail)}")]
    return list(rows.values())


def reason_of(text: str) -> str:
    """The message of an outcome, as one line."""
    lines = [line.strip() for line in ANSI.sub("", text).splitlines()]
    errors = [line[2:].strip() for line in lines if line.startswith("E ")]
    # An assertion in a rank has no words of its own: the line that asserted has.
    asserted = [line for line in lines if line.startswith("assert ")]
    line = next(iter(errors), next(filter(None, lines), ""))
    if line == "AssertionError" and asserted:
        line = f"AssertionError: {asserted[-1]}"
    return line.removeprefix("Skipped: ")[:300]


# Why a test does not pass, by a pattern of "file::name: message". The first that matches counts.
WHY = [
    (r"muon", "Muon is not one of the optimizers"),
    (r"zenflow|zf\.py|split_affinity", "there is no ZenFlow"),
    (r"moe\.|MoE", "there is no expert parallelism"),
    (r"runtime\.pipe|pipeline|Pipeline|parallelism_rejected", "there are no pipelines"),
    (r"step_subgroup|rollback_subgroup|op_builder|Builder\(\)", "reaches into kernels of DeepSpeed's own"),
    (r"torch_autocast|zero\.linear", "there is no replaced linear layer and no autocast of the engine's"),
    (r"ds_tensor|fp32_groups|fp32_partitioned|bf16_groups|averaged_gradients|nccl_start_alignment|allreduce_gradients|leaf_parameters"
     r"|accumulated_grads_in_cpu|PartitionCache|AdamOptimizerStepCount|count_used_parameters|applied_pre_backward"
     r"|pre_bwd_fn|reduce_scatter_fn|_flush_coalesced|uses_bf16_optimizer|BF16_Optimizer|_is_gradient_accumulation_boundary|SimpleNamespace|step_ratio|micro_step_id|_configure_train_batch",
     "reads how DeepSpeed keeps things inside"),
    (r"did not match|Regex", "the error has other words"),
    (r"OptimizerImplementation", "gradients add up in fp32, or in bf16 for bf16 parameters; other types are refused, and those work"),
    (r"differ from rank 0's", "a rank gives another gradient than the others, which is an error here and wanted by the test"),
    (r"isinstance\(ds_optimizer|ds_optimizer == client_optimizer", "what initialize returns is one class, with the described optimizer in `.optimizer`"),
    (r"lr_scheduler was built on an optimizer", "a scheduler whose optimizer is not trained is an error here; DeepSpeed lets it change nothing"),
    (r"was read after the parameter had been partitioned", "keeps what `.detach().cpu()` gives, which on the CPU is no copy, and reads it once the parameter is partitioned"),
    (r"offload_param needs", "offload_param below stage 3 is an error; DeepSpeed ignores it"),
    (r"direct_backward_raises", "loss.backward() works at stage 0 too"),
    (r"unknown key|warmup_type", "a key or value that DeepSpeed ignores is an error here"),
    (r"step\(\) before backward", "the test writes `.grad` by hand; gradients come from a backward here"),
    (r"compression_training", "there is no compression"),
    (r"BingBertSquad", "reads a file from outside of tests/unit"),
    (r"by a ratio", "states are not split by a ratio"),
    (r"Gradients differ|mismatch at", "compares with bf16 sums, bf16 masters and no clipping; here sums and masters are fp32, and gradients are clipped at 1.0, DeepSpeed's default"),
    (r"OffloadOptim.*(did not end|DID NOT RAISE)", "any supported optimizer works with offload; the test wants an error"),
    (r"(gpu_error|overlap_comm|allreduce_rejects|coalesce).*(did not end|DID NOT RAISE)", "what the test wants refused works"),
    (r"did not end|DID NOT RAISE", "an error that the test waits for does not come"),
    (r"skip for now|not working|collection", "switched off in DeepSpeed itself"),
    (r"Found no NVIDIA|no CUDA|CUDA|CPU accelerator|half precision not supported|inf/nan output|NCCL", "DeepSpeed's tests skip it on this machine: they want a GPU, or another CPU"),
    (r"async_io|async-io|AsyncIO", "DeepSpeed's asynchronous files are not offered; states on a disk are the engine's"),
    (r"Lamb", "there is no Lamb"),
    (r"Nvme offload not supported for zero stage", "DeepSpeed has no NVMe below stage 3"),
    (r"Local APIs only", "a test of stage 3 in another stage"),
]


def why(result: Result) -> str:
    """Why a test does not pass, as far as that is known."""
    text = f"{result.file}::{result.name}: {result.reason}"
    return next((reason for pattern, reason in WHY if re.search(pattern, text)), "not explained")


def table(results: list[Result]) -> Iterator[str]:
    """The results as Markdown."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        counts[result.file][result.outcome] += 1
        counts["in all"][result.outcome] += 1
    yield "| file | passed | failed | skipped |"
    yield "|---|---:|---:|---:|"
    for file in sorted(counts, key=lambda file: (file == "in all", file)):
        yield f"| {file} | " + " | ".join(str(counts[file][kind]) for kind in ("passed", "failed", "skipped")) + " |"
    for outcome in ("failed", "skipped"):
        reasons: dict[str, list[Result]] = collections.defaultdict(list)
        for result in results:
            if result.outcome == outcome:
                reasons[why(result)].append(result)
        yield ""
        yield f"| {outcome}, because | tests | these, with the number of their cases |"
        yield "|---|---:|---|"
        for reason, rows in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
            yield f"| {reason} | {len(rows)} | {', '.join(functions(rows))} |"


def functions(results: list[Result]) -> Iterator[str]:
    """The test functions of some results, each with the number of its cases."""
    counts = collections.Counter(f"{pathlib.PurePath(row.file).stem}::{row.name.partition('[')[0]}" for row in results)
    for name, count in sorted(counts.items()):
        yield f"`{name}`" + (f" {count}" if count > 1 else "")


def print_results(results: list[Result]) -> None:
    """The table, and each message of those that have no known reason."""
    print("\n".join(table(results)))
    for result in results:
        if result.outcome != "passed" and why(result) == "not explained":
            print(f"\nnot explained: {result.file}::{result.name}\n    {result.reason}")


def main() -> int:
    """Runs the files; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=pathlib.Path, help="DeepSpeed's source tree, with tests/unit in it")
    parser.add_argument("--file", action="append", help="only this file below tests/unit; may be repeated")
    parser.add_argument("-k", dest="select", default="", help="only tests that pytest's -k selects")
    parser.add_argument("--sample", type=int, default=0, help="at most so many cases of each test function")
    parser.add_argument("--limit", type=float, default=600, help="seconds that files may take, a file")
    parser.add_argument("--json", type=pathlib.Path, help="write the results here as well")
    parser.add_argument("--from", dest="earlier", type=pathlib.Path, nargs="+", help="results that --json wrote")
    parser.add_argument("--page", type=pathlib.Path, help="a page of Markdown; what is between its marks is replaced")
    arguments = parser.parse_args()
    if arguments.earlier:
        rows = [Result(**row) for file in arguments.earlier for row in json.loads(file.read_text())]
        return report(sorted(rows, key=lambda row: FILES.index(row.file)), arguments)
    unit = arguments.source / "tests" / "unit"
    if not unit.is_dir():
        parser.error(f"there is no {unit}; a checkout of DeepSpeed's repository has it, its package on PyPI does not")
    with tempfile.TemporaryDirectory() as folder:
        tests = pathlib.Path(folder) / "tests"
        shutil.copytree(unit, tests / "unit")
        for name in ("conftest.py", "pytest.ini"):
            shutil.copy(arguments.source / "tests" / name, tests / name)
        (tests / "pannier_plugin.py").write_text(PLUGIN)
        (tests / "pannier_preload.py").write_text(PRELOAD)
        (tests / "sitecustomize.py").write_text(ON_THE_CPU + SAY_WHAT_FAILED)
        files = arguments.file or FILES
        results = run_files(tests, files, arguments.limit, arguments.select, arguments.sample)
    return report(results, arguments)


def report(results: list[Result], arguments: argparse.Namespace) -> int:
    """Prints and writes the results; 1 where a test failed."""
    print_results(results)
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    if arguments.page:
        before, mark, rest = arguments.page.read_text().partition(BEGIN)
        arguments.page.write_text(f"{before}{mark}\n" + "\n".join(table(results)) + f"\n{END}{rest.partition(END)[2]}")
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
