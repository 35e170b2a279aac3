"""Vector loops handle every length, shape and start address."""

import pytest
import torch
from torch import nn

from case_models import cfg, start, weight

SUM_AND_LAST = {
    1: (-0.048499, -0.0484985),
    3: (1.701395, 0.9573414),
    7: (-0.151701, -0.3277743),
    8: (0.456459, 0.6081595),
    9: (1.493821, 1.0373622),
    15: (1.139261, 0.9416136),
    16: (1.837723, 0.6984613),
    17: (1.598462, -0.2392608),
    31: (0.231412, -1.0360363),
    33: (0.281730, 0.5026525),
    1023: (1.055324, -0.7829105),
    1025: (-0.116155, -0.2069527),
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}


class Sines(nn.Module):
    """w = sin(i) in a given shape, beside a parameter of one element that shifts its address."""

    def __init__(self, n: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.w = nn.Parameter(torch.sin(torch.arange(n, dtype=torch.float64)).float().reshape(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w.float() * x.reshape(self.w.shape)).sum() + self.shift.float().sum() * 0


@pytest.mark.parametrize("dev", ["none", "cpu"])
def test_every_length_and_shape(dev: str) -> None:
    for n, (total, last) in SUM_AND_LAST.items():
        results = []
        for shape in ((n,), (n, 1), (1, n)):
            engine = start(Sines(n, shape), cfg(dev=dev, opt=OPTIMIZER))
            for s in range(5):
                x = ((s + 1) * torch.cos(torch.arange(n, dtype=torch.float64))).float()
                engine.backward(engine(x))
                engine.step()
            results.append(torch.tensor(weight(engine)).flatten())
            engine.destroy()
        assert results[0].double().sum().item() == pytest.approx(total, abs=1e-4), n
        assert results[0][-1].item() == pytest.approx(last, abs=1e-6), n
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_bf16_homes_agree_for_every_length() -> None:
    for n in SUM_AND_LAST:
        results = []
        for dev in ("none", "cpu"):
            engine = start(Sines(n, (n,)), cfg(dev=dev, opt=OPTIMIZER, bf16={"enabled": True}))
            for s in range(5):
                engine.backward(engine((s + 1) * torch.cos(torch.arange(n).float())))
                engine.step()
            results.append(weight(engine))
            engine.destroy()
        assert results[0] == results[1], n
