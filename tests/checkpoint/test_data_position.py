"""After a resume the samples go on with the very next one: in mid-epoch, with workers, at another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import onecopy
from onecopy.engine.dataloader import ShardedDataLoader
from tests.checkpoint import small


class Numbers(Dataset):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index >= self.count:
            raise IndexError(index)
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(23))


def loaders(world: int, batch: int = 2, **options: Any) -> list[ShardedDataLoader]:
    return [ShardedDataLoader(Numbers(), batch, rank, world, **options) for rank in range(world)]


def take(loader: ShardedDataLoader, batches: int) -> list[list[int]]:
    """So many batches, over as many epochs as it takes."""
    found: list[list[int]] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == batches:
                break
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("taken", [1, 5, 6, 7, 8])
def test_same_ranks_same_samples(workers: int, drop_last: bool, taken: int) -> None:
    for rank in range(2):
        options = {"num_workers": workers, "drop_last": drop_last}
        whole = take(loaders(2, **options)[rank], 14)
        first = loaders(2, **options)[rank]
        assert take(first, taken) == whole[:taken]
        second = loaders(2, **options)[rank]
        second.load_state_dict(first.state_dict())
        assert take(second, 14 - taken) == whole[taken:]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
def test_other_ranks_take_each_sample_once(before: int, after: int) -> None:
    first = loaders(before)
    seen = [sample for loader in first for batch in take(loader, 2) for sample in batch]
    second = loaders(after)
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert set(seen) == set(range(23))
    assert len(seen) - 23 < after  # only what fills up the last round comes twice


def test_making_an_iterator_draws_nothing() -> None:
    before = torch.get_rng_state()
    for loader in loaders(2):
        take(loader, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_batches_of_an_unfinished_window_come_again() -> None:
    loader = loaders(2)[0]
    whole = take(loaders(2)[0], 6)
    take(loader, 4)
    again = loaders(2)[0]
    again.load_state_dict(loader.state_dict(unused_batches=1))
    assert take(again, 3) == whole[3:6]


def test_own_sampler_and_stream() -> None:
    def own() -> ShardedDataLoader:
        sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(4))
        return ShardedDataLoader(Numbers(), 2, 0, 1, sampler=sampler)

    def stream() -> ShardedDataLoader:
        return ShardedDataLoader(Stream(), 2, 0, 1)

    for make in (own, stream):
        whole = take(make(), 20)
        first, second = make(), make()
        take(first, 15)
        second.load_state_dict(first.state_dict())
        assert take(second, 5) == whole[15:]


def run(folder: str, steps: int, save_at: int | None, load: bool) -> list[Any]:
    """Samples and losses of a run with dropout, one rank's."""
    engine, _, loader, _ = onecopy.initialize(
        model=small.make_model(dropout=0.2),
        config=small.config(3, world=2, gradient_accumulation_steps=1),
        training_data=Numbers(31),
    )
    if load:
        engine.load_checkpoint(folder)
    seen: list[Any] = []
    while engine.global_steps < steps:
        for batch in loader:
            tokens = (batch[:, None] + torch.arange(4)) % small.CLASSES
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            seen.append((batch.tolist(), loss.item()))
            if engine.global_steps == save_at:
                engine.save_checkpoint(folder)
            if engine.global_steps == steps:
                break
    engine.destroy()
    return seen


@pytest.mark.parametrize("at", [1, 3, 4])
def test_training_goes_on_to_the_bit(world2, tmp_path: Path, at: int) -> None:
    whole = world2.run(run, str(tmp_path), 7, at, False)
    rest = world2.run(run, str(tmp_path), 7, None, True)
    assert [seen[at:] for seen in whole] == rest
