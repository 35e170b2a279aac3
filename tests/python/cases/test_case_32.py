"""Parameters that are not contiguous keep their logical order."""

import pathlib

import pytest
import torch
from torch import nn

import pannier
from case_models import Turned, cfg, matrix, start
from pannier.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

WANT = [[-0.5, 2.3333333], [0.25, 3.2], [1.1666667, 4.1428571]]


@pytest.mark.parametrize(
    "dtype", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}]
)
def test_transposed(dtype: dict) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    for stage, dev in matrix():
        plain, model = Turned(), Turned()
        engine = start(model, cfg(stage=stage, dev=dev, **dtype))
        assert model.w.shape == (3, 2) and torch.equal(model.w.detach().float(), plain.w.detach())
        loss = engine(x)
        assert loss.item() == plain(x).item()
        engine.backward(loss)
        engine.step()
        master = pannier.safe_get_full_fp32_param(model.w)
        assert torch.allclose(master, torch.tensor(WANT), rtol=0, atol=1e-6)
        assert torch.allclose(model.w.detach().float(), master, rtol=2**-8, atol=0)
        assert engine.optimizer.state[model.w]["exp_avg"].shape == (3, 2)
        assert torch.allclose(engine.optimizer.state[model.w]["exp_avg"], 0.1 * x, rtol=1e-6)


def test_channels_last_convolution() -> None:
    for stage, dev in matrix():
        results = []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(1)
            model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))
            engine = start(model, cfg(stage=stage, dev=dev))
            for _ in range(3):
                engine.backward(engine(x).pow(2).mean())
                engine.step()
            results.append([param.detach().clone() for param in model.parameters()])
        assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [{}, {"bf16": {"enabled": True}}])
def test_a_reload_gives_the_same(dtype: dict, tmp_path: pathlib.Path) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    for stage, dev in matrix():
        folder = tmp_path / f"{stage}{dev}"
        engine = start(Turned(), cfg(stage=stage, dev=dev, **dtype))
        for number in range(2):
            if number == 1:
                engine.save_checkpoint(folder)
            engine.backward(engine(x))
            engine.step()
        want = pannier.safe_get_full_fp32_param(engine.module.w)
        torch.testing.assert_close(get_fp32_state_dict_from_zero_checkpoint(folder)["w"], torch.tensor(WANT), rtol=0, atol=1e-6)
        engine.destroy()
        model = Turned()
        again = start(model, cfg(stage=stage, dev=dev, **dtype))
        again.load_checkpoint(folder)
        torch.testing.assert_close(pannier.safe_get_full_fp32_param(model.w), torch.tensor(WANT), rtol=0, atol=1e-6)
        assert model.w.stride() == Turned().w.stride()
        again.backward(again(x))
        again.step()
        assert torch.equal(pannier.safe_get_full_fp32_param(model.w), want)
        again.destroy()


def test_overlapping_memory_is_an_error() -> None:
    model = nn.Module()
    model.stretched = nn.Parameter(torch.ones(1).expand(4))
    with pytest.raises(pannier.ConfigError, match="stretched"):
        start(model, cfg())
