"""Trains the demo's model once, in one configuration, and writes what happened to a JSON file.

A process of its own for each run, so that nothing of one run's memory is counted in the next. `demo.py` starts it; it
also runs by itself:

    ./dev run python examples/demo/train_once.py --offload cpu --out .demo/one.json
"""

import argparse
import json
import pathlib
import sys
import time

import torch
from torch import nn

import data
import model
import pannier

EXIT_OUT_OF_MEMORY = 3
NUM_BATCHES = 4  # The run goes round and round these, so that in few steps one sees the loss fall.


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offload", choices=["none", "cpu"], default="none", help="where the optimizer states rest")
    parser.add_argument("--device-memory", help='cap on device memory, such as "1.2GiB"; default: none')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--tokens", type=pathlib.Path, help="token file; default: made in .demo/")
    parser.add_argument("--reduced", action="store_true", help="a model of 1 M parameters, for tests")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    return parser.parse_args()


def configuration(chosen: argparse.Namespace) -> dict:
    """The configuration of the run: DeepSpeed's keys, and a cap where one was asked for."""
    config: dict = {
        "train_batch_size": chosen.batch,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
    }
    if chosen.offload == "cpu":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if chosen.dtype != "fp32":
        config[chosen.dtype] = {"enabled": True}
    if chosen.device_memory:
        config["pannier"] = {"device_memory": chosen.device_memory}
    return config


def train(chosen: argparse.Namespace, record: dict) -> None:
    """Trains, and fills `record` as it goes, so that it holds what happened before an error too."""
    torch.manual_seed(42)
    module = (
        model.BigModel(width=32, heads=4, layers=2, vocabulary=30000) if chosen.reduced else model.full_size_model()
    )
    record["num_parameters"] = sum(parameter.numel() for parameter in module.parameters())
    tokens = chosen.tokens or pathlib.Path(data.prepare(pathlib.Path(".demo"))["tokens"])
    source = data.batches(tokens, chosen.batch, chosen.sequence)
    batches = [next(source) for _ in range(NUM_BATCHES)]

    engine, *_ = pannier.initialize(model=module, model_parameters=module.parameters(), config=record["config"])
    record["plan"] = engine.plan()
    record["memory_at_start"] = engine.memory_stats()  # The model was built in fp32, and moved.
    engine.reset_peak_memory()
    engine.start_memory_timeline()
    started = time.monotonic()
    torch.manual_seed(42)  # The same dropout in every run.
    try:
        for step in range(chosen.steps):
            inputs, labels = batches[step % NUM_BATCHES]
            began = time.monotonic()
            loss = nn.functional.cross_entropy(engine(inputs).float(), labels)
            engine.backward(loss)
            engine.step()
            ended = time.monotonic()
            record["steps"].append(
                {
                    "step": step + 1,
                    "loss": loss.item(),
                    "seconds": ended - began,
                    "began": began - started,
                    "ended": ended - started,
                }
            )
            progress(step + 1, chosen.steps, loss.item(), ended - began)
    finally:
        record["memory"] = engine.memory_stats()
        record["timeline"] = engine.memory_timeline()
    engine.destroy()


def progress(step: int, steps: int, loss: float, seconds: float) -> None:
    """Keeps one line up to date on a terminal; elsewhere says every fifth step."""
    text = f"    step {step:>3}/{steps}   loss {loss:.4f}   {seconds:.2f} s"
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if step < steps else "\r\033[K", file=sys.stderr, flush=True)
    elif step % 5 == 0:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    chosen = arguments()
    record: dict = {
        "offload": chosen.offload,
        "device_memory": chosen.device_memory,
        "batch": chosen.batch,
        "sequence": chosen.sequence,
        "dtype": chosen.dtype,
        "config": configuration(chosen),
        "steps": [],
        "steps_are": f"step (every {NUM_BATCHES} go once over the same {NUM_BATCHES} batches)",
    }
    status = 0
    try:
        train(chosen, record)
    except pannier.OutOfMemoryError as error:
        record["error"] = str(error)
        status = EXIT_OUT_OF_MEMORY
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(record))
    return status


if __name__ == "__main__":
    sys.exit(main())
