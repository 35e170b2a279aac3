"""torch's own tools on managed parameters are noticed once."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch import nn

import pannier
from pannier import foreign_use
from reference import config

SGD = {"type": "SGD", "params": {"lr": 0.1}}


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    foreign_use._said.clear()


def test_clipping_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    engine = pannier.initialize(model=nn.Linear(2, 1), config=config(SGD))[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    with caplog.at_level(logging.WARNING, logger="pannier"):
        for _ in range(2):
            assert torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0) == 0
            with contextlib.suppress(RuntimeError):  # torch's own, for an empty list of gradients
                torch.nn.utils.clip_grad_value_(engine.module.weight, 1.0)
    assert caplog.text.count("clip_grad_norm_ finds no gradients") == 1
    assert caplog.text.count("clip_grad_value_ finds no gradients") == 1
    assert "gradient_clipping" in caplog.text and "safe_get_full_grad" in caplog.text


def test_another_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    engine = pannier.initialize(model=nn.Linear(2, 1), config=config(SGD))[0]
    stranger = torch.optim.Adam(engine.module.parameters())
    engine.backward(engine(torch.ones(1, 2)).sum())
    with caplog.at_level(logging.WARNING, logger="pannier"):
        stranger.step()
        stranger.step()
        engine.step()
    assert caplog.text.count("Adam.step() changes nothing") == 1


def test_grad_scaler(caplog: pytest.LogCaptureFixture) -> None:
    engine, optimizer, _, _ = pannier.initialize(model=nn.Linear(2, 1), config=config(SGD))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(engine(torch.ones(1, 2)).sum()).backward()
    with caplog.at_level(logging.WARNING, logger="pannier"):
        for _ in range(2):
            with pytest.raises(AssertionError):  # torch's own: there is no gradient to look at
                scaler.step(optimizer)
    assert caplog.text.count("GradScaler can't work") == 1


def test_others_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    pannier.initialize(model=nn.Linear(2, 1), config=config(SGD))
    model = nn.Linear(2, 1)
    model(torch.full((1, 2), 30.0)).sum().backward()
    with caplog.at_level(logging.WARNING, logger="pannier"):
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert caplog.text == "" and model.weight.grad.norm() <= 1
