"""Trains a small model with a DeepSpeed configuration that was found on the web, word for word.

    ./dev run python examples/first_seed/train.py

The batch size is "auto" there, so it is that of the first batch. Keys that have another name, or mean nothing here,
are named on standard error.
"""

import argparse
import logging
import pathlib

import torch
from torch import nn

import pannier

HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE / "ds_config.json"), help="JSON, comments allowed")
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 64), nn.TransformerEncoderLayer(64, nhead=4, batch_first=True), nn.Linear(64, 256)
    )
    engine, _, _, _ = pannier.initialize(model=model, model_parameters=model.parameters(), config=chosen.config)

    text = torch.tensor(list(pathlib.Path(__file__).read_bytes()))
    windows = text.unfold(0, 33, 16)[:8]  # 8 windows of this file, each one byte longer than what the model reads.
    for step in range(chosen.steps):
        logits = engine(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        print(f"step {step}, loss={loss.item():.4f}")
    print(f"batch size {engine.train_batch_size()}, skipped steps {engine.skipped_steps}")
    engine.destroy()


if __name__ == "__main__":
    main()
