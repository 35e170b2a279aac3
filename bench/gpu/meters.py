"""Device memory and the time of steps."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from gpu.host_memory import GIB

HOW_TIMED = {
    "cuda": "an event on the current stream at each step's start and after the last; the device is synchronized only "
    "before the first and after the last step; seconds_mean is the wall clock from one to the other over the steps",
    "cpu": "the wall clock at each step's start and after the last",
}


@dataclasses.dataclass
class DevicePeaks:
    """Peaks of torch's allocator, of the present phase and of the whole run. On a CPU there are none."""

    device: torch.device
    allocated: int = 0
    reserved: int = 0

    def next_phase(self) -> tuple[int, int]:
        """Ends a phase and returns its peaks (allocated, reserved)."""
        if self.device.type != "cuda":
            return 0, 0
        phase = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        self.allocated, self.reserved = max(self.allocated, phase[0]), max(self.reserved, phase[1])
        torch.cuda.reset_peak_memory_stats(self.device)
        return phase

    def report(self, of_steps: tuple[int, int]) -> dict[str, float | None]:
        """GiB in the timed steps and in the whole run; `device_used_gib` is all that is taken on the device now."""
        if self.device.type != "cuda":
            names = ("peak", "reserved", "run_peak", "run_reserved", "used")
            return {f"device_{name}_gib": None for name in names}
        free, total = torch.cuda.mem_get_info(self.device)
        nbytes = {
            "device_peak_gib": of_steps[0],
            "device_reserved_gib": of_steps[1],
            "device_run_peak_gib": self.allocated,
            "device_run_reserved_gib": self.reserved,
            "device_used_gib": total - free,
        }
        return {name: round(value / GIB, 3) for name, value in nbytes.items()}


class StepClock:
    """Marks the starts of steps without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        synchronize(device)
        self._start = time.perf_counter()

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def report(self) -> dict[str, Any]:
        """Ends the window: waits for the device, then reads the marks."""
        synchronize(self._device)
        window = time.perf_counter() - self._start
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            seconds = [start.elapsed_time(end) / 1000 for start, end in pairs]
        else:
            seconds = [end - start for start, end in pairs]
        return {
            "seconds": round(statistics.median(seconds), 5),
            "seconds_spread": [round(min(seconds), 5), round(max(seconds), 5)],
            "seconds_mean": round(window / len(seconds), 5),
            "seconds_each": [round(value, 5) for value in seconds],
            "timing": HOW_TIMED[self._device.type],
        }


def synchronize(device: torch.device) -> None:
    """Waits for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
