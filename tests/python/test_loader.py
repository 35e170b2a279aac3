"""The loader that `initialize` makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pannier
from reference import config

ADAMW = {"type": "AdamW", "params": {}}
DATA = torch.utils.data.TensorDataset(torch.arange(10.0).view(10, 1))


def loader_of(data=DATA, collate_fn=None, **kw):
    settings = {**config(ADAMW), "train_micro_batch_size_per_gpu": 4, **kw}
    return pannier.initialize(model=nn.Linear(1, 1), config=settings, training_data=data, collate_fn=collate_fn)


def test_micro_batches_cover_the_data_once() -> None:
    loader = loader_of()[2]
    batches = [batch for (batch,) in loader]
    assert len(loader) == 3 and [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(torch.cat(batches).flatten().tolist()) == list(range(10))


def test_drop_last_and_collate() -> None:
    loader = loader_of(collate_fn=lambda samples: sum(x.item() for (x,) in samples), dataloader_drop_last=True)[2]
    assert len(loader) == 2 and all(isinstance(batch, float) for batch in loader)


def test_routes_and_sizes() -> None:
    engine = loader_of()[0]
    plain = engine.deepspeed_io(DATA, batch_size=5, route="eval")
    assert [batch.flatten().tolist() for (batch,) in plain] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert engine.deepspeed_io(DATA).batch_size == 4
    with pytest.raises(pannier.ConfigError, match="Dataset"):
        engine.deepspeed_io([1, 2, 3].__iter__())


def test_iterable_dataset() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6.0))

    loader = loader_of(Stream())[2]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


def test_repeating_loader() -> None:
    repeated = pannier.RepeatingLoader([1, 2, 3])
    assert [next(repeated) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert iter(repeated) is repeated
