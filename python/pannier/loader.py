"""The data loader that `initialize` makes from `training_data`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
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


class Order(Sampler[Any]):
    """A sampler that can begin behind its first samples."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.num_skipped = 0
        self._begun: Iterator[Any] | None = None

    def begin(self) -> None:
        """Begins what the next `iter` goes on with: a sampler may draw its order from torch's random numbers here."""
        if self.num_skipped:
            self._begun = iter(self)

    def __iter__(self) -> Iterator[Any]:
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return begun
        samples = iter(self.sampler)
        for _ in itertools.islice(samples, self.num_skipped):
            pass
        self.num_skipped = 0
        return samples

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


class Batches:
    """One way through a loader, which counts what it gives out. It follows when the loader is told to go on elsewhere."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._restart()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._move != self._loader.num_moves:
            self._restart()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader.position = None
            raise
        self._loader.count(self._position)
        return batch

    def _restart(self) -> None:
        self._move = self._loader.num_moves
        self._batches, self._position = self._loader.begin()


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
        self.position: dict[str, Any] | None = None
        """Where the latest way through is; None where it ended or none began."""
        self.num_moves = 0
        """Calls of `load_state_dict`."""
        self._next: dict[str, Any] | None = None
        self._order = None if data_sampler is None else Order(data_sampler)
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._order,
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
        return Batches(self)

    def __len__(self) -> int:
        return len(self.dataloader)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest way through is: a resume goes on with the batch after it."""
        position = self.position or self._next or {"batches": 0}
        return {**position, "epoch": getattr(self.data_sampler, "epoch", 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind where `state_dict` was taken, in iterators that are under way too."""
        if hasattr(self.data_sampler, "set_epoch"):
            self.data_sampler.set_epoch(state["epoch"])
        self._next = dict(state) if state["batches"] else None
        self.position = None
        self.num_moves += 1

    def count(self, position: dict[str, Any]) -> None:
        """A batch was given out."""
        position["batches"] += 1
        self.position = position

    def begin(self) -> tuple[Iterator[Any], dict[str, Any]]:
        """An iterator of batches, and its position."""
        resumed, self._next = self._next, None
        if resumed is None:
            position = {"batches": 0, "random": torch.random.get_rng_state()}
            return iter(self.dataloader), position
        # torch draws seeds, and some samplers their order, from its random numbers as a way through begins. They are to
        # be what they were, and what comes after is to draw what it would have drawn.
        now = torch.random.get_rng_state()
        torch.random.set_rng_state(resumed["random"])
        try:
            return self._behind(resumed["batches"]), {"batches": resumed["batches"], "random": resumed["random"]}
        finally:
            torch.random.set_rng_state(now)

    def _behind(self, num_batches: int) -> Iterator[Any]:
        if self._order is None:
            batches = iter(self.dataloader)
            for _ in itertools.islice(batches, num_batches):
                pass
            return batches
        self._order.num_skipped = num_batches * self.batch_size
        batches = iter(self.dataloader)
        self._order.begin()
        return batches
