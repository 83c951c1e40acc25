"""The data loader `initialize` makes from `training_data`: each rank its part, a new order every epoch, resumable anywhere.

The position is one number for all ranks: how many samples of the epoch's order the ranks have taken together. Ranks take
samples in turn, so what was taken is always a prefix of the order, and any number of ranks can go on after it.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class ResumableSampler(DistributedSampler[Any]):
    """Torch's order of every epoch, from sample `start` of it on (counted over all ranks)."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        count = len(self.dataset)  # type: ignore[arg-type]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        left = max(0, count - self.start)
        each = left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)
        stop = self.start + each * self.num_replicas
        while count and len(order) < stop:  # the last round is filled up from the beginning
            order += order[: stop - len(order)]
        return iter(order[self.start + self.rank : stop : self.num_replicas])


class _FromPosition:
    """A sampler of the user's own, without its first samples."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.skip, None)

    def __len__(self) -> int:
        return len(self.sampler)


class ShardedDataLoader:
    """A `DataLoader` over this rank's samples; iterating it again shuffles anew (the sampler is told the epoch).

    `state_dict()` says where it is and `load_state_dict()` goes on from there, in the middle of an epoch too, with any
    number of workers (what they fetched ahead was not taken) and ranks. Making an iterator draws nothing from torch's
    global generator. A sampler of the user's own must give the same order for the same epoch, or have a `generator`; an
    iterable dataset is read again up to the position.

    Attributes:
        epoch: the number of the epoch that the next iterator reads.
        post_process_func: if set, every batch is what it gives for (batch, `state_dict()`).
    """

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
        self.world_size = world_size
        self.epoch = 0
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self._iterable = isinstance(dataset, IterableDataset)
        if sampler is None and not self._iterable:
            sampler = ResumableSampler(dataset, num_replicas=world_size, rank=rank, drop_last=drop_last)
        self.sampler = sampler
        self._own = sampler if isinstance(sampler, ResumableSampler) else None
        self._skipping = _FromPosition(sampler) if self._own is None and sampler is not None else None
        self._generator = torch.Generator()
        self._start = 0  # samples over all ranks, of the iterator made next
        self._taken = 0  # samples over all ranks, of the iterator under way
        self._current: object | None = None
        self._order_state: torch.Tensor | None = None  # of the user's sampler's generator when the epoch began
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._own or self._skipping,  # type: ignore[arg-type]
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
            pin_memory=torch.accelerator.is_available(),
            generator=self._generator,
        )

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        self._order_state = self._generator_state()
        if self._own is not None:
            self._own.start = start
        elif self._skipping is not None:
            self._skipping.skip = start // self.world_size
        self._generator.manual_seed(self.epoch)  # the workers' seeds
        self._taken = start
        self._current = token = object()
        self.epoch += 1
        batches: Iterator[Any] = iter(self.loader)
        if self._iterable:
            batches = islice(batches, start // (self.batch_size * self.world_size), None)
        return self._counted(batches, token)

    def _counted(self, batches: Iterator[Any], token: object) -> Iterator[Any]:
        for batch in batches:
            if self._current is token:
                self._taken += self.batch_size * self.world_size
            yield batch if self.post_process_func is None else self.post_process_func(batch, self.state_dict())
        if self._current is token:
            self._current, self._taken = None, 0

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self, unused_batches: int = 0) -> dict[str, Any]:
        """The position after the batches taken so far, but for the last `unused_batches`. The same on all ranks."""
        if self._current is None:
            return {"epoch": self.epoch, "samples": self._start, "order": self._generator_state()}
        samples = max(0, self._taken - unused_batches * self.batch_size * self.world_size)
        if self._own is not None and samples >= self._last():
            return {"epoch": self.epoch, "samples": 0, "order": self._generator_state()}
        return {"epoch": self.epoch - 1, "samples": samples, "order": self._order_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from a saved position; an iterator under way no longer counts."""
        self.epoch = int(state["epoch"])
        self._start = int(state["samples"])
        self._current, self._taken = None, 0
        generator = getattr(self.sampler, "generator", None)
        if state.get("order") is not None and isinstance(generator, torch.Generator):
            generator.set_state(state["order"])

    def _last(self) -> int:
        """Samples over all ranks at which an epoch of our own sampler has no batch left."""
        count = len(self.dataset)  # type: ignore[arg-type]
        if not self.loader.drop_last:
            return count
        step = self.batch_size * self.world_size
        return count // self.world_size // self.batch_size * step

    def _generator_state(self) -> torch.Tensor | None:
        generator = getattr(self.sampler, "generator", None)
        return generator.get_state() if isinstance(generator, torch.Generator) else None
