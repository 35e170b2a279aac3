"""The data loader that `initialize` makes from `training_data`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from pannier.errors import ConfigError


class RepeatingLoader:
    """Starts a loader again when it ends, for ever."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class Loader:
    """Batches of the micro batch size, each rank its own share, shuffled as torch's DistributedSampler does."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        world_size: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.require_dataset(dataset)
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.data_sampler = data_sampler
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            drop_last=drop_last,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )

    @staticmethod
    def require_dataset(data: Any) -> None:
        """Raises for what is not a dataset."""
        is_map = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not is_map and not isinstance(data, IterableDataset):
            raise ConfigError(f"training data must be a torch Dataset, not {type(data).__name__}")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)

    def __len__(self) -> int:
        return len(self.dataloader)
