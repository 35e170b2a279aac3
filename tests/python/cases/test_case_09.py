"""What "Adam" and "AdamW" mean, by their numbers."""

import pytest

from case_models import Dot, cfg, matrix, run, start, weight

ADAMW = ([0.8900000, 2.0800000, 2.8700001, 3.9600000], [0.6732891, 2.2376080, 2.6138875, 3.8811963])
ADAM_L2 = ([0.9, 2.1, 2.9, 3.9], [0.7001746, 2.2998719, 2.7000427, 3.7002740])


@pytest.mark.parametrize(
    ("kind", "more", "want"),
    [("AdamW", {}, ADAMW), ("Adam", {}, ADAMW), ("Adam", {"adam_w_mode": False}, ADAM_L2)],
)
def test_decay_rule(kind: str, more: dict, want: tuple) -> None:
    params = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, **more}
    for stage, dev in matrix():
        engine = start(Dot((1.0, 2.0, 3.0, 4.0)), cfg(stage=stage, dev=dev, opt={"type": kind, "params": params}))
        x = [0.5, -1.0, 2.0, 0.0]
        run(engine, [x])
        assert weight(engine) == pytest.approx(want[0], abs=1e-6)
        run(engine, [x, x])
        assert weight(engine) == pytest.approx(want[1], abs=1e-6)


def test_default_decay_is_zero() -> None:
    engine = start(Dot((1.0, 4.0)), cfg(opt={"type": "AdamW", "params": {"lr": 0.1}}))
    run(engine, [[1.0, 0.0]])
    assert weight(engine)[1] == 4.0
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0
