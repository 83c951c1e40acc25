"""Lay parameters end to end in one flat buffer and cut it into equal shards, one a rank.

        | a      |pad| b   |pad| c            |pad| end padding |      [n], n a multiple of 64 x N
        |------- rank 0 -------|------- rank 1 -------|               each rank owns [n/N]

Every parameter starts at a multiple of 64 elements and every shard is a multiple of 64 elements long, so that a block
of 64 elements of a parameter is never cut, whatever the bucket sizes, the stage or the number of ranks: vector kernels
and norms see the same blocks everywhere, which is what makes the stages bit-equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # elements


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """One parameter's place in its flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def aligned_stop(self) -> int:
        """Where the next parameter may start: the parameter's own padding belongs to it."""
        return round_up(self.stop, ALIGNMENT)

    def overlap(self, start: int, stop: int) -> tuple[int, int] | None:
        """The part of the parameter inside `[start, stop)` of the flat buffer, in elements from the parameter's start."""
        low, high = max(self.start, start), min(self.stop, stop)
        return (low - self.start, high - self.start) if low < high else None


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The ranges of all parameters of one flat buffer, its padded length and its equal shards."""

    ranges: tuple[ParameterRange, ...]
    numel: int
    world_size: int

    @classmethod
    def pack(cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]], world_size: int) -> "FlatLayout":
        """Lay parameters of these names and shapes in the given order; zero-size parameters take no room."""
        position = 0
        ranges = []
        for name, shape in zip(names, shapes, strict=True):
            numel = 1
            for size in shape:
                numel *= size
            ranges.append(ParameterRange(name, tuple(shape), position, numel))
            position = round_up(position + numel, ALIGNMENT)
        return cls(tuple(ranges), round_up(position, ALIGNMENT * world_size), world_size)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """The half-open range `[start, stop)` of elements that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def in_shard(self, rank: int) -> Iterator[tuple[ParameterRange, int, int]]:
        """Each parameter with elements in the shard of `rank`, with the bounds of that part inside the parameter."""
        start, stop = self.shard_bounds(rank)
        for parameter in self.ranges:
            part = parameter.overlap(start, stop)
            if part is not None:
                yield parameter, *part
