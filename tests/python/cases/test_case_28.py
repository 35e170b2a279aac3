"""Tied weights are one parameter; a look-alike of equal values is another."""

import pathlib

import pytest
import torch

import pannier
from case_models import Tied, cfg, matrix, start, weight
from pannier.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.1, "eps": 1.0, "weight_decay": 0.0}}
ROWS = [[-0.0024249, 0.1218363], [0.2160558, 0.3343268], [0.4465069, 0.5623966], [0.7250521, 0.8436102]]


def test_tied_pair_trains_as_one() -> None:
    tokens = torch.tensor([1, 2])
    for stage, dev in matrix():
        model = Tied()
        engine = start(model, cfg(stage=stage, dev=dev, opt=OPTIMIZER))
        losses, norms = [], []
        for _ in range(2):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        assert losses == pytest.approx([0.22924805, 0.19200754], abs=1e-6)
        assert norms == pytest.approx([0.7344737, 0.6425920], abs=1e-6)
        assert torch.tensor(weight(engine, "emb.weight")).flatten().tolist() == pytest.approx(
            [value for row in ROWS for value in row], abs=1e-6
        )
        assert model.emb.weight is model.head.weight
        state = engine.module_state_dict()
        assert torch.equal(state["emb.weight"], state["head.weight"])
        assert sum(param is model.emb.weight for param in engine.optimizer.state) == 1
        assert engine.optimizer.state[model.emb.weight]["exp_avg"].numel() == 8

        # Gradient for one twin alone moves that one alone.
        engine.backward((model.twin_a * 2).sum())
        engine.step()
        assert not torch.equal(model.twin_a, model.twin_b)
        assert torch.equal(model.twin_b.detach(), torch.arange(8.0).view(4, 2) / 8)

        engine.load_module_state_dict({"module": {key: value.clone() for key, value in state.items()}})
        engine.backward(engine(tokens))
        engine.step()
        assert model.emb.weight is model.head.weight
        assert pannier.safe_get_full_fp32_param(model.head.weight) is not None
        engine.destroy()


def test_saved_consolidated_and_loaded(tmp_path: pathlib.Path) -> None:
    tokens = torch.tensor([1, 2])
    for stage, dev in matrix():
        folder = tmp_path / f"{stage}{dev}"
        engine = start(Tied(), cfg(stage=stage, dev=dev, opt=OPTIMIZER))
        for number in range(3):
            if number == 2:
                engine.save_checkpoint(folder)
            engine.backward(engine(tokens))
            engine.step()
        want = weight(engine, "emb.weight")
        engine.destroy()

        exported = get_fp32_state_dict_from_zero_checkpoint(folder)
        assert exported["emb.weight"] is exported["head.weight"]
        torch.testing.assert_close(exported["head.weight"], torch.tensor(ROWS), rtol=0, atol=1e-6)
        fresh = Tied()
        fresh.load_state_dict(exported, strict=True)
        assert fresh.emb.weight is fresh.head.weight

        file = pannier.core.open_checkpoint(str(folder), "")
        moments = [name for name in pannier.core.call(file.names) if name.endswith(("emb.weight", "head.weight")) and "exp_avg_sq" in name]
        assert len(moments) == 1 and pannier.core.call(file.read, moments[0]).numel() == 8

        model = Tied()
        again = start(model, cfg(stage=stage, dev=dev, opt=OPTIMIZER))
        again.load_checkpoint(folder)
        again.backward(again(tokens))
        again.step()
        assert weight(again, "emb.weight") == want and model.emb.weight is model.head.weight
        assert torch.equal(model.twin_b.detach(), torch.arange(8.0).view(4, 2) / 8)
        again.destroy()
