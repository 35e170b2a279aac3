"""The update alone: bf16 gradient to bf16 parameter with clipping, beside the machine's copy rate, torch's fused AdamW with
the passes that it needs for the same job, and DeepSpeedCPUAdam where it can be built (on its own job: fp32 gradients)."""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys

import torch

from pairs import alternate, ratio, report

BYTES = 26  # Per parameter: gradient 2; parameter, rest and both moments read and written.
NUMEL = 64 << 20
ROUNDS = 9


class Ours:
    """The engine's own kernel through the binding, on torch's threads."""

    def __init__(self, state: str, grad: torch.Tensor, weights: torch.Tensor) -> None:
        self.buffers = torch.classes.pannier.UpdateBench(state, weights, grad)

    def step(self) -> None:
        self.buffers.step(1e-4, 0.9, 0.999, 1e-8, 0.01, 0.5)

    def weights(self) -> torch.Tensor:
        return self.buffers.weights()


class TorchFused:
    """The same job with torch: scale the bf16 gradient into fp32, fused AdamW on fp32 masters, cast to bf16."""

    def __init__(self, grad: torch.Tensor, weights: torch.Tensor) -> None:
        self.grad16 = grad
        self.param16 = weights.to(torch.bfloat16)
        self.master = torch.nn.Parameter(weights.clone())
        self.master.grad = torch.zeros_like(weights)
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-4, weight_decay=0.01, fused=True)

    def step(self) -> None:
        self.master.grad.copy_(self.grad16)
        self.master.grad.mul_(0.5)
        self.optimizer.step()
        self.param16.copy_(self.master.detach())

    def weights(self) -> torch.Tensor:
        return self.master.detach()


def deepspeed_adam(arrays: list[torch.Tensor]):
    """DeepSpeedCPUAdam on fp32 arrays (weights, both moments, gradient), or the reason why there is none."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.path.insert(0, os.environ.get("PANNIER_BENCH_PEERS", ""))
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

        param = torch.nn.Parameter(arrays[0])
        param.grad = arrays[3]
        optimizer = DeepSpeedCPUAdam([param], lr=1e-4, weight_decay=0.01)
        optimizer.state[param] = {"step": 0, "exp_avg": arrays[1], "exp_avg_sq": arrays[2]}
        optimizer.step()
    except Exception as error:  # noqa: BLE001  (whatever goes wrong in somebody else's build)
        return None, f"{type(error).__name__}: {error}"
    return optimizer.step, ""


def against_copy() -> None:
    """The kernel beside the best of several copy kernels on the same threads: build/dev/bin/bench_update prints JSON lines."""
    program = pathlib.Path(__file__).parents[1] / "build/dev/bin/bench_update"
    subprocess.run([program, str(torch.get_num_threads())], check=True)


def main(_arguments: list[str]) -> int:
    import pannier  # noqa: F401, PLC0415  (loads the library)

    against_copy()
    torch.manual_seed(0)
    weights = torch.randn(NUMEL)
    grad = torch.randn(NUMEL).to(torch.bfloat16)
    ours, peer = Ours("bf16", grad, weights), TorchFused(grad, weights)
    ours.step(), peer.step()
    worst = (ours.weights() - peer.weights()).abs().max().item()
    report(bench="update", check="weights after a step, against torch", worst_difference=worst)
    if worst > 2e-6:
        print("the update differs from torch's; no speed is reported")
        return 1
    seconds = alternate({"ours": ours.step, "torch": peer.step}, ROUNDS)
    middle, least, most = ratio(seconds, "torch", "ours")
    rate = NUMEL / statistics.median(seconds["ours"])
    report(bench="update", job="bf16 gradient to bf16 parameter, clipping", parameters_per_second=rate, bytes_per_second=rate * BYTES,
           times_torch_fused=round(middle, 3), spread=[round(least, 3), round(most, 3)], threads=torch.get_num_threads())
    del ours, peer
    # Both work on the same arrays in turn: on a shared machine where pages lie decides more than the kernel does.
    own = Ours("fp32", grad.float(), weights)
    step, reason = deepspeed_adam(own.buffers.arrays())
    if step is None:
        report(bench="update", peer="DeepSpeedCPUAdam", not_run=reason)
        return 0
    seconds = alternate({"ours": own.step, "deepspeed": step}, 3 * ROUNDS)
    middle, least, most = ratio(seconds, "deepspeed", "ours")
    report(bench="update", job="fp32 gradient to fp32 parameter, 28 bytes", times_deepspeed_cpu_adam=round(middle, 3),
           spread=[round(least, 3), round(most, 3)])
    return 0
