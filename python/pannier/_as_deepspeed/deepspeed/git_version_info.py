"""The version that stands in for DeepSpeed's."""

version = "0.19.6+pannier"
git_hash = "unknown"
git_branch = "unknown"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
torch_info = {"version": "0.0", "cuda_version": "0.0", "hip_version": "0.0"}
