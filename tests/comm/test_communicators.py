"""Both back ends on gloo ranks: gather and reduce in place, sums in rank order, bytes counted, errors in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from onecopy.comm import Communicator, connect
from onecopy.errors import CommunicationError
from tests.worlds import World

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gathers_and_reduces(point_to_point: bool) -> None:
    communicator = connect(None, CPU, point_to_point=point_to_point)
    rank, size = communicator.rank, communicator.world_size
    for dtype in DTYPES:
        numel = 64 * size * 3
        whole = torch.full((numel,), float("nan"), dtype=dtype)
        mine = numel // size
        for each in range(size):
            if each == rank:
                whole[each * mine : (each + 1) * mine] = values(each, mine, dtype)
        pending = communicator.start_gather(whole, 7, "weights")
        pending.wait()
        pending.drain()
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
    scratch = torch.empty(numel - mine, dtype=dtype)
    out = torch.empty(mine, dtype=exact)
    communicator.start_reduce(values(rank, numel, dtype), scratch, 9, "gradients").finish(out, accumulate=False)
    assert torch.equal(out, wanted), "a sum in fp32 in rank order"
    communicator.start_reduce(values(rank, numel, dtype), scratch, 9, "gradients").finish(out, accumulate=True)
    torch.testing.assert_close(out, 2 * wanted)
    low = torch.empty(mine, dtype=torch.bfloat16)
    communicator.start_reduce(values(rank, numel, dtype), scratch, 9, "gradients").finish(low, accumulate=False)
    assert torch.equal(low, wanted.to(torch.bfloat16))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("point_to_point", [True, False])
def test_gather_and_reduce(world: Any, size: int, point_to_point: bool) -> None:
    """In every dtype the bits of a sum in rank order, on both back ends."""
    world(size).run(gathers_and_reduces, point_to_point)


def small_agreements(point_to_point: bool) -> tuple[list[float], list[Any], dict[str, int]]:
    communicator = connect(None, CPU, point_to_point=point_to_point)
    rank = communicator.rank
    summed = communicator.sum_vector(torch.tensor([1.0, float(rank)], dtype=torch.float64), "numbers")
    spread = torch.full((3,), float(rank))
    communicator.broadcast(spread, communicator.world_size - 1, "spread")
    assert spread.tolist() == [communicator.world_size - 1.0] * 3
    answer = summed.tolist(), communicator.exchange(f"rank {rank}", "names"), dict(communicator.counters.bytes_sent)
    communicator.close()
    return answer


@pytest.mark.parametrize("point_to_point", [True, False])
def test_small_agreements(world3: World, point_to_point: bool) -> None:
    for summed, names, sent in world3.run(small_agreements, point_to_point):
        assert summed == [3.0, 3.0]
        assert names == ["rank 0", "rank 1", "rank 2"]
        assert sent["agree"] == 2 * 16


def many_at_once() -> None:
    """Gathers and reduces in flight together, waited for in another order."""
    communicator = connect(None, CPU)
    rank, size = communicator.rank, communicator.world_size
    numel = 64 * size
    gathers = []
    for key in range(1, 9):
        whole = torch.zeros(numel)
        whole[rank * 64 : (rank + 1) * 64] = 100 * key + rank
        gathers.append((key, whole, communicator.start_gather(whole, key, f"weights {key}")))
    reduces = []
    for key in range(1, 9):
        scratch = torch.empty(numel - 64)
        reduces.append(
            (key, communicator.start_reduce(torch.full((numel,), float(key + rank)), scratch, key, "gradients"))
        )
    for key, whole, pending in reversed(gathers):
        pending.drain()
        assert whole.view(size, 64)[:, 0].tolist() == [100.0 * key + each for each in range(size)]
    for key, pending in reversed(reduces):
        out = torch.empty(64)
        pending.finish(out, accumulate=False)
        assert out[0] == sum(key + each for each in range(size))
    communicator.close()


@pytest.mark.parametrize("size", [2, 4])
def test_many_in_flight_and_waited_for_in_any_order(world: Any, size: int) -> None:
    world(size).run(many_at_once)


def missing_rank() -> None:
    communicator = connect(None, CPU, timeout_seconds=3)
    try:
        if communicator.rank == 0:
            whole = torch.zeros(128)
            communicator.start_gather(whole, 1, "block 3").wait()
        else:
            communicator.start_gather(torch.zeros(128), 2, "block 4").wait()
    finally:
        communicator.close()


def test_different_calls_raise_on_every_rank(world2: World) -> None:
    """Two ranks that wait for different things get one error each that names what they wait for."""
    with pytest.raises(CommunicationError, match="block 3|block 4") as caught:
        world2.run(missing_rank, timeout=40, stray_groups=True)
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
