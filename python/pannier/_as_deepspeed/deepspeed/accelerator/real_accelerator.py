"""The device as DeepSpeed's accelerator object. On a CPU its memory is what Pannier's meter counts."""

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

    def current_device(self) -> str:
        """The one device, as torch takes it where a device is wanted."""
        return "cpu"

    def current_device_name(self) -> str:
        """Its name."""
        return "cpu"

    def device_count(self) -> int:
        """Ranks of this machine share it: as many as there are ranks."""
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)

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

    def random(self) -> Any:
        """torch's module of random numbers."""
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        """torch's generator."""
        return torch.default_generator

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


class CUDAAccelerator(CPUAccelerator):
    """A GPU as DeepSpeed's accelerator object: torch.cuda by other names."""

    def device_name(self, device_index: int | None = None) -> str:
        """The type, or the device of that index."""
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which it is the current device."""
        return torch.cuda.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Makes it the current device."""
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """Its index."""
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        """Its name."""
        return f"cuda:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        """How many torch sees."""
        return torch.cuda.device_count()

    def is_synchronized_device(self) -> bool:
        """Calls return before the work is done."""
        return False

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for all work."""
        torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """The backend for torch's process group."""
        return "nccl"

    def manual_seed(self, seed: int) -> None:
        """Seeds the current device."""
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds all devices."""
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """The current device's seed."""
        return torch.cuda.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """A device's generator state."""
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets a device's generator state."""
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that torch has given out."""
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that torch has given out."""
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch holds."""
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most that torch has held."""
        return torch.cuda.max_memory_reserved(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Starts the peaks anew."""
        torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """torch's own."""
        return torch.cuda.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        return torch.cuda.get_device_properties(device_index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that torch has not given out."""
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def empty_cache(self) -> None:
        """Gives back what torch holds and nobody uses."""
        torch.cuda.empty_cache()

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return torch.cuda.is_bf16_supported()

    def is_triton_supported(self) -> bool:
        """It is."""
        return True

    def pin_memory(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """A copy in pinned memory."""
        return tensor.pin_memory()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a GPU."""
        return tensor.device.type == "cuda"

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        """A stream of torch's."""
        return torch.cuda.Stream(*args, **kwargs)

    def Event(self, **kwargs: Any) -> Any:
        """An event of torch's."""
        return torch.cuda.Event(**kwargs)

    def current_stream(self, device_index: int | None = None) -> Any:
        """torch's current stream."""
        return torch.cuda.current_stream(device_index)

    def range_push(self, msg: str) -> None:
        """Begins a range for the profiler."""
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Ends it."""
        torch.cuda.nvtx.range_pop()


@functools.cache
def get_accelerator() -> CPUAccelerator:
    """The accelerator that there is, or the one that the variable DS_ACCELERATOR names."""
    wanted = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
    kinds = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator}
    if wanted not in kinds:
        raise ValueError(f"DS_ACCELERATOR is {wanted!r}; Pannier trains on cpu and cuda")
    return kinds[wanted]()


def is_current_accelerator_supported() -> bool:
    """It is one of the two."""
    return get_accelerator().device_name() in ("cpu", "cuda")
