"""Rectangles of a flat range: together they are the range, in order, and there are few of them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy.layout import Box, boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, start, draw(st.integers(start, total))


@given(ranges())
def test_boxes_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    found: list[int] = []
    pieces = boxes(shape, start, stop)
    for box in pieces:
        part = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        values = part.reshape(-1).tolist()
        assert box.numel == len(values) > 0
        assert values == list(range(box.start, box.start + box.numel)), "side by side in the flat tensor"
        found += values
    assert found == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


def test_a_whole_tensor_is_one_box() -> None:
    assert boxes((3, 4), 0, 12) == [Box((0, 0), (3, 4), 0)]
    assert boxes((), 0, 1) == [Box((), (), 0)]
    assert boxes((3, 4), 5, 5) == []
