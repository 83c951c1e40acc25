"""The data loader `initialize` makes from `training_data`: each rank its part, a new order every epoch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class ShardedDataLoader:
    """A `DataLoader` over this rank's samples; iterating it again shuffles anew (the sampler is told the epoch)."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        world_size: int,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        sampler: Any = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, drop_last=drop_last)  # type: ignore[arg-type]
        self.sampler = sampler
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
            pin_memory=torch.accelerator.is_available(),
        )

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)
