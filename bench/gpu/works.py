"""What is trained: a shape of model and the tokens of a step. A work is known by its name, such as `1.5b-16k`.

    [zero3-]SHAPE[-LAYERSl]-TOKENSk    for example zero3-1.5b-16k, or 7b-30l-4k: the 7 B shape with 30 layers
    tiny, seed                         a model for tests; the model of examples/seed_script.py
"""

from __future__ import annotations

import dataclasses
import re

_NAME = re.compile(r"(?P<zero3>zero3-)?(?P<shape>[\d.]+b)(-(?P<layers>\d+)l)?-(?P<tokens>\d+)k")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Qwen2-shaped language model."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool


SHAPES = {
    "1.5b": Shape(151936, 1536, 28, 12, 2, 8960, tied=True),
    "3b": Shape(151936, 2048, 36, 16, 2, 11008, tied=True),
    "7b": Shape(152064, 3584, 28, 28, 4, 18944, tied=False),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """One work: `shape` is None for the two that are no Qwen2."""

    name: str
    shape: Shape | None
    batch: int
    sequence: int
    vocab: int
    precision: str = "bf16"
    offloads_parameters: bool = False  # The work is about parameters in host memory too.
    learning_rate: float = 1e-5
    weight_decay: float = 0.01

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


def parse(name: str) -> Work:
    """The work of that name; ValueError where there is none."""
    if name == "tiny":
        return Work(name, None, batch=2, sequence=16, vocab=64, learning_rate=1e-3)
    if name == "seed":
        return Work(name, None, 8, 128, 30000, precision="fp16", learning_rate=1e-4, weight_decay=0.0)
    found = _NAME.fullmatch(name)
    if not found or found["shape"] not in SHAPES:
        raise ValueError(f"no work is called {name!r}: write for example 1.5b-16k, zero3-1.5b-16k or 7b-30l-4k")
    shape = SHAPES[found["shape"]]
    if found["layers"]:
        shape = dataclasses.replace(shape, layers=int(found["layers"]))
    sequence = 2048
    batch = int(found["tokens"]) * 1024 // sequence
    if batch < 1:
        raise ValueError(f"{name}: a step has {sequence} tokens or more")
    return Work(name, shape, batch, sequence, shape.vocab, offloads_parameters=bool(found["zero3"]))
