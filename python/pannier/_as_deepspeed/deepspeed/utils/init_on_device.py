"""Models that are built on a device of choice, "meta" included."""

import contextlib
from types import TracebackType
from typing import Any

import torch


class OnDevice(contextlib.AbstractContextManager[None]):
    """Modules made inside have floating tensors of `dtype` on `device`."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._inner: Any = None
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._inner = torch.device(self.device)
            self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            self._inner.__exit__(kind, error, traceback)
            torch.set_default_dtype(self._before)
