"""The engine's batch sizes, and the loaders that make batches of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pannier import arguments, core
from pannier.config import Config
from pannier.config_values import ConfigValues
from pannier.errors import ConfigError
from pannier.loader import Loader


class Batches(ConfigValues):
    """The part of an engine that knows how many samples make a micro-batch and a step."""

    collate_fn: Callable[[list[Any]], Any] | None
    global_rank: int
    world_size: int
    dp_world_size: int
    _config: Config
    _first_batch: int | None = None
    """Samples that the latest forward saw, -1 where it saw no tensor; None before any."""

    @property
    def core(self) -> Any:
        """The core's engine."""
        raise NotImplementedError

    @property
    def config(self) -> dict[str, Any]:
        """The configuration with all defaults filled in."""
        return self._config.config

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the accumulation steps so that `train_batch_size` samples make a step."""
        arguments.require_size("train_batch_size", train_batch_size)
        micro = self.train_micro_batch_size_per_gpu()
        arguments.require_size("train_micro_batch_size_per_gpu", micro)
        if train_batch_size <= 0 or train_batch_size % (micro * self.dp_world_size) != 0:
            raise ConfigError(
                f"train batch size {train_batch_size} is not a positive multiple of micro batch size {micro} times "
                f"{self.dp_world_size} ranks"
            )
        self._set_batch(micro, train_batch_size // (micro * self.dp_world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro batch size; the accumulation steps stay."""
        arguments.require_size("micro_batch_size", micro_batch_size)
        arguments.require_size("gradient_accumulation_steps", self.gradient_accumulation_steps())
        self._set_batch(micro_batch_size, self.gradient_accumulation_steps())

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader of micro-batches over `dataset`; shuffled for the route "train"."""
        return Loader(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            world_size=self.dp_world_size,
            rank=self.global_rank,
            shuffle=route == "train",
            data_sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=self.dataloader_drop_last(),
            pin_memory=pin_memory,
        )

    def _needs_first_batch(self) -> bool:
        return self.config.get("train_micro_batch_size_per_gpu") in (0, None, "auto")

    def _look_at_batch(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # A batch size left "auto" is that of the first batch. While forward is traced, the core can't be called: what
        # was seen is kept until the verb that comes next.
        if not self._needs_first_batch():
            return
        self._first_batch = -1
        for value in (*inputs, *kwargs.values()):
            if (size := _samples_of(value)) is not None:
                self._first_batch = size
                break
        if not torch.compiler.is_compiling():
            self._resolve_batch()

    def _resolve_batch(self) -> None:
        if self._first_batch is None or not self._needs_first_batch():
            return
        if self._first_batch < 0:
            raise ConfigError(
                "train_micro_batch_size_per_gpu is auto, and the first batch holds no tensor to take it from"
            )
        self._config.resolve_batch(self.world_size, int(self._first_batch))
        self._set_batch(self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps())

    def _set_batch(self, micro: int, steps: int) -> None:
        core.call(self.core.set_batch, micro, steps)
        self._config.set_batch(micro * steps * self.dp_world_size, micro, steps)


def _samples_of(value: Any) -> int | None:
    """The length of the first tensor in `value`, which may be nested in lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() > 0 else None
    if isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            if (size := _samples_of(item)) is not None:
                return size
    return None
