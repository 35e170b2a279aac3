"""The CPU as DeepSpeed's accelerator object. Its memory is what Pannier's meter counts."""

import contextlib
import functools
import json
import os
from typing import Any

import torch


class CPUAccelerator:
    """What scripts ask of an accelerator."""

    def device_name(self, device_index: int | None = None) -> str:
        """Also the prefix of torch's device names."""
        return "cpu"

    def device(self, device_index: int | None = None) -> Any:
        """A context for code that selects a device."""
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """There is one device."""

    def current_device(self) -> int:
        """There is one device."""
        return 0

    def current_device_name(self) -> str:
        """Its name."""
        return "cpu"

    def device_count(self) -> int:
        """There is one device."""
        return 1

    def is_available(self) -> bool:
        """It is there."""
        return True

    def is_synchronized_device(self) -> bool:
        """Work is done when a call returns."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Work is done when a call returns."""

    def communication_backend_name(self) -> str:
        """The backend for torch's process group."""
        return "gloo"

    def manual_seed(self, seed: int) -> None:
        """Seeds torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """torch's seed."""
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """torch's generator state."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets torch's generator state."""
        torch.set_rng_state(new_state)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that torch holds."""
        return self._memory()["current"]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that torch has held."""
        return self._memory()["peak"]

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Starts the peak anew."""
        torch.ops.pannier.reset_device_peak()

    reset_max_memory_allocated = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """By torch's keys."""
        memory = self._memory()
        return {"allocated_bytes.all.current": memory["current"], "allocated_bytes.all.peak": memory["peak"]}

    def total_memory(self, device_index: int | None = None) -> int:
        """The cap where one is set, else the machine's memory."""
        return self._memory()["cap"] or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """What is left of `total_memory`."""
        return self.total_memory() - self.memory_allocated()

    def empty_cache(self) -> None:
        """There is no cache."""

    def is_bf16_supported(self) -> bool:
        """Computation in bf16 works."""
        return True

    def is_fp16_supported(self) -> bool:
        """Computation in fp16 works."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What parameters may be."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        """Not on a CPU."""
        return False

    def pin_memory(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Nothing to pin for."""
        return tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device."""
        return tensor.device.type == "cpu"

    def range_push(self, msg: str) -> None:
        """No profiler listens."""

    def range_pop(self) -> None:
        """No profiler listens."""

    def _memory(self) -> dict[str, int]:
        return json.loads(torch.ops.pannier.device_memory())


@functools.cache
def get_accelerator() -> CPUAccelerator:
    """The accelerator."""
    return CPUAccelerator()
