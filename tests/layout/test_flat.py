"""Flat buffers: parameters never overlap, start at blocks, and the ranks' shards tile the buffer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecopy.layout import ALIGNMENT, FlatLayout, Place, placement_for_stage, round_up

SHAPES = st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=12)


def packed(shapes: list[tuple[int, ...]], world_size: int) -> FlatLayout:
    return FlatLayout.pack([f"p{place}" for place in range(len(shapes))], shapes, world_size)


@given(SHAPES, st.integers(1, 9))
def test_parameters_lie_in_order_and_apart(shapes: list[tuple[int, ...]], world_size: int) -> None:
    """Every start is a multiple of 64 elements, nothing overlaps, and the length divides into equal shards of blocks."""
    layout = packed(shapes, world_size)
    position = 0
    for place, shape in zip(layout.ranges, shapes, strict=True):
        assert place.shape == shape and place.numel == math.prod(shape)
        assert place.start % ALIGNMENT == 0 and place.start >= position
        assert place.start - position < ALIGNMENT
        assert place.stop <= place.aligned_stop < place.stop + ALIGNMENT
        position = place.stop
    assert layout.numel >= position and layout.numel % (ALIGNMENT * world_size) == 0
    assert layout.numel - position < ALIGNMENT * (world_size + 1)
    assert layout.shard_numel * world_size == layout.numel


@given(SHAPES, st.integers(1, 9))
def test_shards_hold_every_element_once(shapes: list[tuple[int, ...]], world_size: int) -> None:
    """The parts that ranks own of a parameter are its elements, each once and in order."""
    layout = packed(shapes, world_size)
    seen: dict[str, int] = {place.name: 0 for place in layout.ranges}
    previous = 0
    for rank in range(world_size):
        start, stop = layout.shard_bounds(rank)
        assert start == previous and start % ALIGNMENT == 0
        previous = stop
        for place, low, high in layout.in_shard(rank):
            assert low == seen[place.name] < high <= place.numel
            assert start <= place.start + low and place.start + high <= stop
            seen[place.name] = high
    assert previous == layout.numel
    assert all(seen[place.name] == place.numel for place in layout.ranges)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(number: int, multiple: int) -> None:
    rounded = round_up(number, multiple)
    assert rounded % multiple == 0 and number <= rounded < number + multiple


def test_a_stage_is_a_row_of_the_table() -> None:
    """Each stage shards one kind of state more than the one before."""
    rows = [placement_for_stage(stage, 2) for stage in range(4)]
    sharded = [(row.optimizer.sharded, row.gradients.sharded, row.parameters.sharded) for row in rows]
    assert sharded == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    assert all(placement_for_stage(stage, 1).parameters is Place.WHOLE for stage in range(4))
    with pytest.raises(ValueError, match="stage is 4"):
        placement_for_stage(4, 2)
