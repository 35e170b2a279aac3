"""Real text that every machine has: the sources of Python's standard library, as tokens.

`prepare()` trains a byte-level BPE vocabulary of exactly 30,000 tokens on them, writes the tokens to one file of
uint16, and keeps both under `.demo/`, so that only the first demo on a machine pays for it. `batches()` draws (tokens,
label) pairs from that file in an order that depends on nothing but the seed.
"""

import hashlib
import json
import os
import pathlib
import sysconfig
import time
from collections.abc import Iterator

import numpy
import torch

VOCABULARY = 30_000
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
SEPARATOR = "<|file|>"  # Stands between two files; the one token that is not learned.


def source_files() -> list[pathlib.Path]:
    """Returns the standard library's own .py files, without tests and installed packages, in a fixed order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in LEFT_OUT)
        found += [pathlib.Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def prepare(cache: pathlib.Path) -> dict:
    """Makes `cache`/tokens.bin and `cache`/vocabulary.json unless they are there; returns what the data is.

    The keys: tokens (path), num_tokens, num_files, num_bytes, vocabulary, python, seconds (0 when it was there).
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in source_files()]
    digest = hashlib.sha256(
        f"{VOCABULARY} {SEPARATOR}\0".encode() + "\0".join(texts).encode("utf-8", "replace")
    ).hexdigest()
    description = cache / "data.json"
    if description.exists():
        known = json.loads(description.read_text())
        if known["digest"] == digest and pathlib.Path(known["tokens"]).exists():
            return known | {"seconds": 0.0}
    started = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    tokens = _tokenize(texts, cache)
    path = cache / "tokens.bin"
    tokens.tofile(path)
    known = {
        "tokens": str(path.resolve()),
        "num_tokens": int(tokens.size),
        "num_files": len(texts),
        "num_bytes": sum(len(text.encode("utf-8", "replace")) for text in texts),
        "vocabulary": VOCABULARY,
        "python": sysconfig.get_python_version(),
        "digest": digest,
    }
    description.write_text(json.dumps(known, indent=1))
    return known | {"seconds": time.monotonic() - started}


def _tokenize(texts: list[str], cache: pathlib.Path) -> numpy.ndarray:
    """Trains the vocabulary on `texts`, saves it, and returns all texts as one run of uint16 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # Only the first run needs it.

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[SEPARATOR],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(
            f"the standard library here has only {sum(map(len, texts))} characters of source, "
            f"enough for {tokenizer.get_vocab_size()} of {VOCABULARY} tokens; is it installed without its .py files?"
        )
    tokenizer.save(str(cache / "vocabulary.json"))
    separator = [tokenizer.token_to_id(SEPARATOR)]
    encoded = tokenizer.encode_batch(texts)
    return numpy.fromiter((token for text in encoded for token in (*text.ids, *separator)), dtype=numpy.uint16)


def batches(
    tokens: pathlib.Path, batch: int, sequence: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (inputs [batch, sequence], labels [batch]) without end: windows of text, and the token after each."""
    text = numpy.fromfile(tokens, dtype=numpy.uint16)
    generator = numpy.random.Generator(numpy.random.PCG64(seed))
    while True:
        starts = generator.integers(0, text.size - sequence, size=batch)
        windows = torch.tensor(
            numpy.stack([text[start : start + sequence + 1] for start in starts]).astype(numpy.int64)
        )
        yield windows[:, :-1].contiguous(), windows[:, -1].contiguous()


if __name__ == "__main__":
    print(json.dumps(prepare(pathlib.Path(".demo")), indent=1))
