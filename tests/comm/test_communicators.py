"""All back ends on gloo ranks: gather and reduce in place, sums in rank order, bytes counted, errors in words."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from onecopy.comm import Communicator, connect
from onecopy.errors import CommunicationError
from tests.worlds import World

CPU = torch.device("cpu")
KINDS = ("collective", "point_to_point", "shared_memory")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def room(communicator: Communicator, like: torch.Tensor) -> torch.Tensor:
    """A copy of `like` in memory that the communicator made."""
    return communicator.allocate(like.nbytes).view(like.dtype).copy_(like)


def gathers_and_reduces(kind: str) -> None:
    communicator = connect(None, CPU, kind=kind)
    rank, size = communicator.rank, communicator.world_size
    for dtype in DTYPES:
        numel = 64 * size * 3
        whole = room(communicator, torch.full((numel,), float("nan"), dtype=dtype))
        mine = numel // size
        for each in range(size):
            if each == rank:
                whole[each * mine : (each + 1) * mine] = values(each, mine, dtype)
        communicator.gather(whole, 7, "weights")
        assert torch.equal(whole, torch.cat([values(each, mine, dtype) for each in range(size)]))
        check_reduce(communicator, dtype, numel)
    communicator.close()


def check_reduce(communicator: Communicator, dtype: torch.dtype, numel: int) -> None:
    rank, size = communicator.rank, communicator.world_size
    mine = numel // size
    own = slice(rank * mine, (rank + 1) * mine)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = values(0, numel, dtype)[own].to(exact)
    for each in range(1, size):
        wanted = wanted + values(each, numel, dtype)[own].to(exact)
    scratch = torch.empty(numel - mine, dtype=dtype) if communicator.needs_scratch else None
    out = torch.empty(mine, dtype=exact)
    sent = room(communicator, values(rank, numel, dtype))
    reduce = communicator.start_reduce(communicator.wire(sent, scratch), 9, "gradients")
    reduce.finish(out, accumulate=False)
    reduce.drain()
    assert torch.equal(out, wanted), "a sum in fp32 in rank order"
    again = communicator.wire(values(rank, numel, dtype), scratch)
    communicator.start_reduce(again, 9, "gradients").finish(out, accumulate=True)
    torch.testing.assert_close(out, 2 * wanted)
    low = torch.empty(mine, dtype=torch.bfloat16)
    without_scratch = communicator.wire(values(rank, numel, dtype))
    communicator.start_reduce(without_scratch, 9, "gradients").finish(low, accumulate=False)
    assert torch.equal(low, wanted.to(torch.bfloat16))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_gather_and_reduce(world: Any, size: int, kind: str) -> None:
    """In every dtype the bits of a sum in rank order, on every back end."""
    world(size).run(gathers_and_reduces, kind)


def small_agreements(kind: str) -> tuple[list[float], list[Any], dict[str, int]]:
    communicator = connect(None, CPU, kind=kind)
    rank = communicator.rank
    summed = communicator.sum_vector(torch.tensor([1.0, float(rank)], dtype=torch.float64), "numbers")
    spread = torch.full((3,), float(rank))
    communicator.broadcast(spread, communicator.world_size - 1, "spread")
    assert spread.tolist() == [communicator.world_size - 1.0] * 3
    answer = summed.tolist(), communicator.exchange(f"rank {rank}", "names"), dict(communicator.counters.bytes_sent)
    communicator.close()
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_small_agreements(world3: World, kind: str) -> None:
    for summed, names, sent in world3.run(small_agreements, kind):
        assert summed == [3.0, 3.0]
        assert names == ["rank 0", "rank 1", "rank 2"]
        assert sent["agree"] == 2 * 16


def many_at_once(kind: str, shared: bool) -> None:
    """Gathers and reduces in flight together, waited for in another order; on one rank gradients first."""
    communicator = connect(None, CPU, kind=kind)
    rank, size = communicator.rank, communicator.world_size
    numel = 64 * size
    make = (lambda like: room(communicator, like)) if shared else torch.clone
    gathers: list[Any] = []
    for key in range(1, 9):
        whole = make(torch.zeros(numel))
        whole[rank * 64 : (rank + 1) * 64] = 100 * key + rank
        gathers.append((key, whole, communicator.start_gather(communicator.wire(whole), key, f"weights {key}")))
    reduces: list[Any] = []
    for key in range(1, 9):
        scratch = torch.empty(numel - 64) if communicator.needs_scratch else None
        gradients = make(torch.full((numel,), float(key + rank)))
        reduces.append((key, communicator.start_reduce(communicator.wire(gradients, scratch), key, "gradients")))

    def weights() -> None:
        for key, whole, pending in reversed(gathers):
            pending.drain()
            assert whole.view(size, 64)[:, 0].tolist() == [100.0 * key + each for each in range(size)]

    def sums() -> None:
        for key, pending in reversed(reduces):
            out = torch.empty(64)
            pending.finish(out, accumulate=False)
            pending.drain()
            assert out[0] == sum(key + each for each in range(size))

    for part in (sums, weights) if rank == 0 else (weights, sums):
        part()
    communicator.close()


@pytest.mark.parametrize(
    ("kind", "shared"), [("point_to_point", False), ("shared_memory", True), ("shared_memory", False)]
)
@pytest.mark.parametrize("size", [2, 4])
def test_many_in_flight_and_waited_for_in_any_order(world: Any, size: int, kind: str, shared: bool) -> None:
    world(size).run(many_at_once, kind, shared)


def the_same_key_again() -> list[float]:
    """A rank that is ahead does not overwrite what the others have not read."""
    communicator = connect(None, CPU, kind="shared_memory")
    rank, size = communicator.rank, communicator.world_size
    first, second = (room(communicator, torch.zeros(64 * size)) for _ in range(2))
    seen = []
    for turn in range(40):
        buffer = (first, second)[turn % 2]
        pending = communicator.start_gather(communicator.wire(buffer.fill_(turn + 1000 * rank)), 3, "weights")
        if turn % 7 == rank:
            time.sleep(0.01)
        pending.wait()
        seen.append(float(buffer.sum()))
        pending.drain()
    communicator.close()
    return seen


def test_a_rank_that_is_ahead_waits_for_its_readers(world: Any) -> None:
    for size in (2, 3):
        wanted = [64.0 * sum(turn + 1000 * rank for rank in range(size)) for turn in range(40)]
        assert all(seen == wanted for seen in world(size).run(the_same_key_again))


def elsewhere() -> float:
    """Rank 1 is in a collective of the program's own while rank 0 needs the buffer that rank 1 has not read yet."""
    communicator = connect(None, CPU, kind="shared_memory")
    rank = communicator.rank
    wire = communicator.wire(room(communicator, torch.full((128,), 1.0 + rank)))
    out = torch.empty(64)
    pending = communicator.start_reduce(wire, 5, "gradients")
    if rank == 1:
        dist.barrier()
    pending.finish(out, accumulate=False)
    pending.drain()
    if rank == 0:
        dist.barrier()
    communicator.close()
    return float(out.sum())


def test_gradients_are_read_while_a_rank_is_elsewhere(world2: World) -> None:
    assert world2.run(elsewhere, timeout=30) == [192.0, 192.0]


def shares() -> tuple[str, bool]:
    communicator = connect(None, CPU)
    kind = type(communicator).__name__
    freed = communicator.allocate(1 << 20)
    communicator.close()
    return kind, bool((freed == 0).all())


def test_ranks_of_one_machine_share_memory(world2: World) -> None:
    assert world2.run(shares) == [("SharedMemory" if hasattr(os, "memfd_create") else "PointToPoint", True)] * 2


def strangers() -> str:
    """The other rank's files cannot be opened, as in another container."""
    with mock.patch("onecopy.comm.shared_memory.open_of", side_effect=PermissionError):
        communicator = connect(None, CPU)
    kind = type(communicator).__name__
    communicator.close()
    return kind


def test_ranks_that_cannot_share_memory_use_sockets(world2: World) -> None:
    assert world2.run(strangers) == ["PointToPoint", "PointToPoint"]


def missing_rank(kind: str) -> None:
    communicator = connect(None, CPU, timeout_seconds=3, kind=kind)
    try:
        whole = room(communicator, torch.zeros(128))
        key, label = (1, "block 3") if communicator.rank == 0 else (2, "block 4")
        communicator.start_gather(communicator.wire(whole), key, label).wait()
    finally:
        communicator.close()


@pytest.mark.parametrize("kind", ["point_to_point", "shared_memory"])
def test_different_calls_raise_on_every_rank(world2: World, kind: str) -> None:
    """Two ranks that wait for different things get one error each that names what they wait for."""
    with pytest.raises(CommunicationError, match="block 3|block 4") as caught:
        world2.run(missing_rank, kind, timeout=40, stray_groups=True)
    assert any("CommunicationError" in note for note in caught.value.__notes__)


def timeouts() -> list[float]:
    found = []
    for seconds in (None, 7.0):
        communicator = connect(None, CPU, timeout_seconds=seconds)
        found.append(communicator.group._get_backend(CPU).options._timeout.total_seconds())
        communicator.close()
    parent = dist.group.WORLD._get_backend(CPU).options._timeout.total_seconds()  # type: ignore[union-attr]
    return [*found, parent]


def test_the_timeout_reaches_the_engines_own_groups(world2: World) -> None:
    """The parent's when nothing is said, else the configured one; never the library's default."""
    for inherited, given, parent in world2.run(timeouts):
        assert inherited == parent and given == 7.0
