"""One model, trained three ways on real text: without offload, with it, and under a memory cap that lies between.

    ./dev demo

Prints one table and writes two plots under .demo/. Exits with 1 unless the losses with and without offload are the same
bits and fall, the cap stops the run without offload, and the run with offload trains under it.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import time

import data
import model
import report
import train_once

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequence", type=int, default=128, help="tokens of each of the 8 windows in a step")
    parser.add_argument(
        "--dtype",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="auto: bf16 where this machine's processor multiplies it, else fp32 (fp16 takes minutes a step on most)",
    )
    parser.add_argument("--reduced", action="store_true", help="a model of 1 M parameters, for tests")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(".demo"), help="folder for what is written (default: .demo)"
    )
    parser.add_argument(
        "--data", type=pathlib.Path, default=pathlib.Path(".demo"), help="folder of the tokens (default: .demo)"
    )
    parser.add_argument(
        "--publish", action="store_true", help="put this run's table and plots into README.md and docs/images"
    )
    return parser.parse_args()


def pick_dtype() -> str:
    """bf16 where oneDNN has it for this processor, else fp32."""
    import torch

    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def run(title: str, name: str, chosen: argparse.Namespace, tokens: str, *options: str) -> dict:
    """Runs train_once.py in a process of its own and returns its record, which may say out of memory."""
    print(f"\n{title}", flush=True)
    out = chosen.out / f"{name}.json"
    out.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(HERE / "train_once.py"),
        "--steps",
        str(chosen.steps),
        "--sequence",
        str(chosen.sequence),
        "--dtype",
        chosen.dtype,
        "--tokens",
        tokens,
        "--out",
        str(out),
        *options,
    ]
    if chosen.reduced:
        command.append("--reduced")
    began = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if status not in (0, train_once.EXIT_OUT_OF_MEMORY):
        raise SystemExit(f"the run ended with status {status}: {' '.join(command)}")
    record = json.loads(out.read_text()) | {"title": title, "name": name, "wall_seconds": time.monotonic() - began}
    out.write_text(json.dumps(record))
    if "error" in record:
        print(textwrap.fill(record["error"], 116, initial_indent="    ", subsequent_indent="    "))
    else:
        print(f"    {len(record['steps'])} steps in {record['wall_seconds']:.0f} s, start included", flush=True)
    return record


def prepare(chosen: argparse.Namespace) -> str:
    """Makes the tokens and says what they are; returns their path."""
    text = data.prepare(chosen.data)
    made = f"prepared in {text['seconds']:.0f} s" if text["seconds"] else "prepared earlier"
    print(
        f"data    {text['num_files']} sources of Python {text['python']}'s standard library, "
        f"{text['num_bytes'] / 1e6:.1f} MB: {text['num_tokens']:,} "
        f"tokens of a BPE vocabulary of {text['vocabulary']:,} ({made})"
    )
    return text["tokens"]


def checks(cap: str, free: dict, offloaded: dict, refused: dict, capped: dict) -> list[tuple[bool, str]]:
    """What the demo promises, each with whether it held."""
    losses = [[step["loss"] for step in record["steps"]] for record in (free, offloaded, capped)]
    first, last = (
        sum(part) / len(part) for part in (losses[0][: train_once.NUM_BATCHES], losses[0][-train_once.NUM_BATCHES :])
    )
    return [
        (losses[0] == losses[1], f"losses with and without offload are the same bits in all {len(losses[0])} steps"),
        (losses[1] == losses[2], "and so they are under the cap"),
        (
            last < first,
            f"losses fall: from {first:.2f} over the first {train_once.NUM_BATCHES} steps to {last:.2f} over the last "
            f"{train_once.NUM_BATCHES}, the same batches",
        ),
        ("error" in refused, "the cap stops the run without offload"),
        (
            "error" not in capped and report.device_peak(capped) <= report.cap_bytes(cap),
            "with offload the run trains under the cap",
        ),
    ]


def publish(chosen: argparse.Namespace, cap: str, records: list[dict], seconds: float) -> None:
    """Makes the first page show this run: its table and plots, and where it ran."""
    for plot in ("memory.png", "loss.png"):
        shutil.copy(chosen.out / plot, ROOT / "docs/images" / plot)
    page = ROOT / "README.md"
    before, rest = page.read_text().split("<!-- demo -->\n")
    after = rest.split("<!-- end of demo -->\n")[1]
    text = (
        f"`./dev demo`: {model.NUM_PARAMETERS:,} parameters, {chosen.dtype}, Adam, {chosen.steps} steps of 8 x "
        f"{chosen.sequence} tokens of the sources of Python's standard library, on {os.cpu_count()} cores "
        f"({report.processor()}). Device memory is capped at {report.shown(cap)} in the last two runs. The losses of "
        f"all three that train are the same bits. All of it took {seconds:.0f} s.\n"
    )
    page.write_text(f"{before}<!-- demo -->\n{report.markdown_table(records)}\n{text}<!-- end of demo -->\n{after}")


def main() -> int:
    began = time.monotonic()
    chosen = arguments()
    chosen.dtype = pick_dtype() if chosen.dtype == "auto" else chosen.dtype
    size = "reduced" if chosen.reduced else f"{model.NUM_PARAMETERS:,} parameters"
    print(
        f"model   {size}, {chosen.dtype}, Adam; {chosen.steps} steps of 8 x {chosen.sequence} tokens, "
        f"{os.cpu_count()} cores"
    )
    tokens = prepare(chosen)
    free = run("without offload", "without", chosen, tokens)
    offloaded = run("with offload", "with", chosen, tokens, "--offload", "cpu")
    for record in (free, offloaded):
        if "error" in record:
            raise SystemExit("this run must not fail: nothing is capped yet")
    cap = report.cap_between(report.device_peak(free), report.device_peak(offloaded))
    print(f"\nfrom here on device memory is capped at {report.shown(cap)}, halfway between the two peaks")
    refused = run("capped, without offload", "capped-without", chosen, tokens, "--device-memory", cap)
    capped = run("capped, with offload", "capped-with", chosen, tokens, "--offload", "cpu", "--device-memory", cap)

    records = [free, offloaded, refused, capped]
    print("\n" + report.text_table(records))
    (chosen.out / "table.md").write_text(report.markdown_table(records))
    results = checks(cap, *records)
    for kept, promise in results:
        print(f"{'ok    ' if kept else 'FAILED'}  {promise}")
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts/plot_run.py"),
            "--out",
            str(chosen.out),
            "--cap",
            str(report.cap_bytes(cap)),
            str(chosen.out / "without.json"),
            str(chosen.out / "with.json"),
        ],
        check=True,
    )
    held = all(kept for kept, _ in results)
    if chosen.publish and held:
        publish(chosen, cap, records, time.monotonic() - began)
    print(
        f"\ntook {time.monotonic() - began:.0f} s; table in {chosen.out / 'table.md'}, plots in "
        f"{chosen.out / 'memory.png'} and {chosen.out / 'loss.png'}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
