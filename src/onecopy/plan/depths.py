"""Which two depths stand for a deep model: blocks that differ come first, or in turns, and must be in both as in the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHALLOW = (2, 4)  # blocks, where all are equal
_MOST = 8  # blocks of their own at the start, or in turns


@dataclass(frozen=True)
class Pattern:
    """`head` blocks of their own (DeepSeek's dense ones, say), then others in turns of `period` (Jamba's)."""

    head: int = 0
    period: int = 1


def pattern_of(sizes: Sequence[int]) -> Pattern:
    """The shortest pattern of the blocks' elements; that of equal blocks where there is none."""
    found = [
        Pattern(head, period)
        for head in range(_MOST + 1)
        for period in range(1, _MOST + 1)
        if len(sizes) >= head + 2 * period
        and all(a == b for a, b in zip(sizes[head:], sizes[head + period :], strict=False))
    ]
    return min(found, key=lambda one: (one.head + one.period, one.head), default=Pattern())


def depths_of(pattern: Pattern, layers: int, slots: int, checkpointing: str | int) -> tuple[int, int]:
    """The two depths for a model of `layers` blocks: with as many units as slots at least, as it has, and ending as it ends.

    What a whole turn of blocks adds is constant; with every n-th block checkpointed a turn is of n blocks too.
    """
    turn = math.lcm(pattern.period, checkpointing if isinstance(checkpointing, int) else 1)
    low = pattern.head + max(SHALLOW[0], slots)
    low += (layers - low) % turn
    return low, low + turns(SHALLOW[1] - SHALLOW[0], turn)


def turns(blocks: int, turn: int) -> int:
    """The least number of blocks that is at least `blocks`, in whole turns."""
    return -(-blocks // turn) * turn
