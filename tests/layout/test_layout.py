"""Flat layouts and boxes: every element has one place, one owner, and one rectangle."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecopy.layout import ALIGNMENT, FlatLayout, boxes, placement_for_stage

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(st.lists(SHAPES, max_size=6), st.integers(1, 9))
def test_every_element_is_owned_once(shapes: list[tuple[int, ...]], world_size: int) -> None:
    names = [f"p{place}" for place in range(len(shapes))]
    layout = FlatLayout.pack(names, shapes, world_size)
    assert layout.numel % (ALIGNMENT * world_size) == 0
    assert all(r.start % ALIGNMENT == 0 for r in layout.ranges)
    for first, second in zip(layout.ranges, layout.ranges[1:]):
        assert first.stop <= second.start
    owned = {name: 0 for name in names}
    for rank in range(world_size):
        for parameter, low, high in layout.in_shard(rank):
            assert low == owned[parameter.name]
            owned[parameter.name] = high
    assert owned == {name: math.prod(shape) for name, shape in zip(names, shapes)}


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_boxes_tile_a_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    position = start
    for box in found:
        assert box.start == position
        assert all(o >= 0 and o + s <= size for o, s, size in zip(box.offsets, box.sizes, shape))
        position += box.numel
    assert position == stop


def test_one_rank_shards_no_parameters() -> None:
    assert not placement_for_stage(3, world_size=1).parameters.sharded
    assert placement_for_stage(3, world_size=2).parameters.sharded
    with pytest.raises(ValueError, match="0, 1, 2 or 3"):
        placement_for_stage(4, world_size=2)
