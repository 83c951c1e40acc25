"""The pool of ranks itself: results in order, errors with their traceback, and recovery from ranks that die or hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.worlds import RankFailure, World, _worlds

GetWorld = Callable[[int], World]


def total_of_ranks(start: int, *, scale: int = 1) -> tuple[int, torch.Tensor]:
    tensor = torch.full((3,), float(start + dist.get_rank() * scale))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int | None) -> str:
    if rank is None or dist.get_rank() == rank:
        raise ValueError(f"wrong on rank {dist.get_rank()}")
    return "fine"


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


class NotPicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_not_picklable() -> None:
    raise NotPicklable(1, 2)


def return_not_picklable() -> object:
    return lambda: None


def leave_group() -> None:
    dist.new_group([0])


def change_everything() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(99)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def state() -> tuple[torch.dtype, bool, float, str | None, str]:
    left = os.environ.get("LEFT_BEHIND")
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(1).item(), left, os.getcwd()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(world: GetWorld, size: int) -> None:
    results = world(size).run(total_of_ranks, 1, scale=2)
    assert [rank for rank, _ in results] == list(range(size))
    expected = float(size + size * (size - 1))
    assert all(torch.equal(tensor, torch.full((3,), expected)) for _, tensor in results)


def test_ranks_are_kept_between_calls(world2: World) -> None:
    assert world2.run(process_id) == world2.run(process_id)


def test_an_error_on_every_rank_is_raised_and_keeps_the_world(world2: World) -> None:
    before = world2.run(process_id)
    with pytest.raises(ValueError, match="wrong on rank") as caught:
        world2.run(raise_on, None)
    assert any("raise_on" in note for note in caught.value.__notes__)
    assert world2.run(process_id) == before


def test_an_error_on_one_rank_restarts_the_world(world2: World) -> None:
    before = world2.run(process_id)
    with pytest.raises(ValueError, match="wrong on rank 1"):
        world2.run(raise_on, 1)
    assert set(world2.run(process_id)).isdisjoint(before)


def test_a_dead_rank_is_named_and_the_world_restarts(world2: World) -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2 was killed by SIGKILL in die_on"):
        world2.run(die_on, 1)
    assert len(world2.run(process_id)) == 2


def test_a_hanging_rank_is_named_with_its_stack(world2: World) -> None:
    with pytest.raises(RankFailure, match=r"ranks \[1\] of 2 in sleep_on[\s\S]*sleep_on"):
        world2.run(sleep_on, 1, timeout=2)
    assert len(world2.run(process_id)) == 2


def test_errors_and_results_that_cannot_be_pickled_are_told(world1: World) -> None:
    with pytest.raises(RankFailure, match="NotPicklable: 1 and 2"):
        world1.run(raise_not_picklable)
    with pytest.raises(RankFailure, match="type function cannot be pickled"):
        world1.run(return_not_picklable)


def test_process_groups_left_behind_are_reported_once(world2: World) -> None:
    with pytest.raises(RankFailure, match="process groups left behind"):
        world2.run(leave_group)
    world2.run(leave_group, stray_groups=True)
    world2.run(process_id)


def test_each_call_starts_from_the_same_state(world1: World) -> None:
    before = world1.run(state)
    world1.run(change_everything)
    assert world1.run(state) == before


def test_few_ranks_are_alive_at_once(world: GetWorld) -> None:
    for size in (4, 3, 2):
        world(size).run(process_id)
    assert sum(each.size for each in _worlds.values() if each.alive) <= 7


def test_functions_that_ranks_cannot_import_are_refused(world1: World) -> None:
    with pytest.raises(TypeError, match="top-level function"):
        world1.run(lambda: None)
