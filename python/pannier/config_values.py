"""The engine's getters of configuration values, by DeepSpeed's method names."""

from __future__ import annotations

from typing import Any

import torch


class ConfigValues:
    """Reads `self.config`, the resolved configuration."""

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        raise NotImplementedError

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks; "auto", as the other two, until a first batch tells."""
        return self.config.get("train_batch_size", "auto")

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        return self.config.get("train_micro_batch_size_per_gpu", "auto")

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.config.get("gradient_accumulation_steps", "auto")

    def get_batch_info(self) -> tuple[int, int, int]:
        """Train batch size, micro batch size, accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; otherwise every `step()` ends a window."""
        return self.value("managed_gradient_accumulation", default=True)

    def gradient_clipping(self) -> float:
        """The greatest global norm, 0 for no clipping."""
        return self.value("gradient_clipping", default=0.0)

    def prescale_gradients(self) -> bool:
        """As configured; sums are fp32, so it changes nothing."""
        return self.value("prescale_gradients", default=False)

    def postscale_gradients(self) -> bool:
        """The opposite of `prescale_gradients`."""
        return not self.prescale_gradients()

    def gradient_predivide_factor(self) -> float:
        """As configured; sums are fp32, so it changes nothing."""
        return self.value("gradient_predivide_factor", default=1.0)

    def steps_per_print(self) -> float | None:
        """As configured."""
        return self.value("steps_per_print")

    def wall_clock_breakdown(self) -> bool:
        """As configured."""
        return self.value("wall_clock_breakdown", default=False)

    def memory_breakdown(self) -> bool:
        """As configured."""
        return self.value("memory_breakdown", default=False)

    def dump_state(self) -> bool:
        """As configured."""
        return self.value("dump_state", default=False)

    def dataloader_drop_last(self) -> bool:
        """Whether the loader drops an incomplete last batch."""
        return self.value("dataloader_drop_last", default=False)

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.value("fp16", "enabled", default=False)

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.value("bf16", "enabled", default=False)

    def fp16_auto_cast(self) -> bool:
        """Whether floating inputs of forward become fp16."""
        return self.fp16_enabled() and self.value("fp16", "auto_cast", default=False)

    def amp_enabled(self) -> bool:
        """Apex is not used."""
        return False

    def loss_scale(self) -> float:
        """The configured static scale, 0 for a dynamic one."""
        return self.value("fp16", "loss_scale", default=0.0)

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes with the gradients."""
        return self.fp16_enabled() and self.loss_scale() == 0

    def initial_dynamic_scale(self) -> float:
        """Where a dynamic scale starts."""
        return 2.0 ** self.value("fp16", "initial_scale_power", default=16)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of parameters and of accumulated gradients."""
        model = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        names = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        return model, names.get(self.value("data_types", "grad_accum_dtype"), torch.float32)

    def zero_optimization(self) -> bool:
        """Whether the stage is above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.value("zero_optimization", "stage", default=0)

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the stage shards gradients."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the stage shards parameters."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> dict[str, Any] | None:
        """The section as resolved."""
        return self.value("zero_optimization", "offload_optimizer")

    def zero_offload_param(self) -> dict[str, Any] | None:
        """The section as resolved."""
        return self.value("zero_optimization", "offload_param")

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether optimizer states rest outside the device."""
        return self.value("zero_optimization", "offload_optimizer", "device", default="none") in ("cpu", "nvme")

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states rest in host memory."""
        return self.value("zero_optimization", "offload_optimizer", "device", default="none") == "cpu"

    def zero_reduce_bucket_size(self) -> int:
        """Elements of a bucket."""
        return self.value("zero_optimization", "reduce_bucket_size")

    def zero_ignore_unused_parameters(self) -> bool:
        """Whether a parameter may go without a gradient."""
        return self.value("zero_optimization", "ignore_unused_parameters", default=True)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether stage 3 may gather whole weights to save them."""
        return self.value("zero_optimization", "stage3_gather_16bit_weights_on_model_save", default=False)

    def zero_overlap_comm(self) -> bool:
        """As configured; whether transfers overlap is not a choice."""
        return self.value("zero_optimization", "overlap_comm", default=self.zero_optimization_stage() == 3)

    def zero_contiguous_gradients(self) -> bool:
        """As configured; it changes nothing."""
        return self.value("zero_optimization", "contiguous_gradients", default=True)

    def zero_reduce_scatter(self) -> bool:
        """As configured; it changes nothing."""
        return self.value("zero_optimization", "reduce_scatter", default=True)

    def zero_allgather_bucket_size(self) -> int:
        """As configured; gathers follow the model's units."""
        return self._count("allgather_bucket_size", 5 * 10**8)

    def zero_sub_group_size(self) -> int:
        """As configured; states travel by chunks of the planner's."""
        return self._count("sub_group_size", 10**9)

    def zero_prefetch_bucket_size(self) -> int:
        """As configured; the next unit is fetched ahead."""
        return self._count("stage3_prefetch_bucket_size", 5 * 10**7)

    def zero_max_live_parameters(self) -> int:
        """As configured; one unit and the next are whole."""
        return self._count("stage3_max_live_parameters", 10**9)

    def zero_param_persistence_threshold(self) -> int:
        """Elements below which a parameter stays whole, as configured."""
        return self._count("stage3_param_persistence_threshold", 10**5)

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer states rest on a disk."""
        return self.value("zero_optimization", "offload_optimizer", "device") == "nvme"

    def sparse_gradients_enabled(self) -> bool:
        """Gradients are dense."""
        return False

    def flops_profiler_enabled(self) -> bool:
        """torch.profiler does it."""
        return False

    def pld_enabled(self) -> bool:
        """There is no progressive layer dropping."""
        return False

    def optimizer_params(self) -> dict[str, Any] | None:
        """The fields of the optimizer section."""
        return self.value("optimizer", "params")

    def scheduler_name(self) -> str | None:
        """The type of the scheduler section."""
        return self.value("scheduler", "type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """The fields of the scheduler section."""
        return self.value("scheduler", "params")

    def _count(self, key: str, default: int) -> int:
        value = self.value("zero_optimization", key)
        return default if not isinstance(value, (int, float)) else int(value)

    def value(self, *path: str, default: Any = None) -> Any:
        """The value at a path of keys, `default` where any of them is missing or null."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return default if value is None else value
