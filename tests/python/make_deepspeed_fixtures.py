"""Writes the checkpoints of tests/python/cases/deepspeed, by DeepSpeed itself, on the CPU.

Run once a stage, on two ranks under torchrun, with DeepSpeed installed: `make_deepspeed_fixtures.py STAGE FOLDER`. Then
`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state` makes a universal one of each, from which the
`truth.pt` of stages 1 and 2 is taken; that of stage 3 is what DeepSpeed's own accessors say.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_fixture import SEEN, Net, groups_of


def main(stage: int, folder: str) -> None:
    """Trains three steps and saves."""
    torch.manual_seed(3)
    model = Net()
    model.seen.copy_(SEEN)
    groups = groups_of(model, weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0), config=config)
    rank = int(os.environ["RANK"])
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + rank)
        engine.backward(engine(torch.randint(7, (2, 5), generator=draw)))
        engine.step()
    engine.save_checkpoint(folder, tag="t3", client_state={"epoch": 2})
    if stage < 3:
        return
    truth = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            truth[name] = {"fp32_param": safe_get_full_fp32_param(param).clone()}
            for state in ("exp_avg", "exp_avg_sq"):
                truth[name][state] = safe_get_full_optimizer_state(param, state).clone()
    if rank == 0:
        torch.save(truth, f"{folder}/truth.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
