"""The version that stands in for DeepSpeed's."""

import torch

version = "0.19.6+pannier"
git_hash = "unknown"
git_branch = "unknown"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": "0.0",
    "nccl_version": "0.0",
    "bf16_support": True,
}
