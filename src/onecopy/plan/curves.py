"""Bus bandwidth by message size and ranks: measured points, and what lies between them.

A point is (ranks, bytes of the whole buffer, bytes per second over the bus). Bus bandwidth is nccl-tests' word for what a
ring's links carry: an all-gather or reduce-scatter of S bytes takes S (N-1)/N / busbw, an all-reduce twice that.
"""

from __future__ import annotations

import math
from bisect import bisect_left

Point = tuple[int, int, float]


def seconds_between(points: tuple[Point, ...], ranks: int, nbytes: float) -> float:
    """Seconds of an all-gather or reduce-scatter of a whole buffer of `nbytes`, between measured sizes and worlds.

    Between two sizes time grows as a power of the size; below the smallest it stays (latency), above the largest the
    bandwidth stays. A world between two measured ones lies between their times; outside, the nearest counts.
    """
    worlds = sorted({world for world, _, _ in points})
    place = bisect_left(worlds, ranks)
    low, high = worlds[max(0, place - 1)], worlds[min(place, len(worlds) - 1)]
    if high == ranks or place == 0 or place == len(worlds):
        return _of_one_world(points, high if place < len(worlds) else low, ranks, nbytes)
    share = (ranks - low) / (high - low)
    before, after = (_of_one_world(points, world, ranks, nbytes) for world in (low, high))
    return before + share * (after - before)


def _of_one_world(points: tuple[Point, ...], world: int, ranks: int, nbytes: float) -> float:
    sizes = sorted((size, rate) for one, size, rate in points if one == world)
    part = (ranks - 1) / ranks
    if nbytes >= sizes[-1][0]:
        return nbytes * part / sizes[-1][1]
    times = _never_falling([size * part / rate for size, rate in sizes])
    if nbytes <= sizes[0][0]:
        return times[0]
    place = next(index for index, (size, _) in enumerate(sizes) if size > nbytes)
    (below, above), (early, late) = (sizes[place - 1][0], sizes[place][0]), (times[place - 1], times[place])
    share = math.log(nbytes / below) / math.log(above / below)
    return math.exp(math.log(early) + share * math.log(late / early))


def _never_falling(times: list[float]) -> list[float]:
    """A small message cannot take longer than a large one: where a table says so, its first entries were warm-up."""
    for place in range(len(times) - 2, -1, -1):
        times[place] = min(times[place], times[place + 1])
    return times
