"""Matrices that lie in pieces over the ranks, each made whole on one rank, worked on there, and dealt out again.

Every matrix has an owner. Its pieces travel to the owner and the result's pieces travel back, once each, in rounds that
bound the memory; inside a round the work is dealt out evenly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from onecopy.comm import Communicator
from onecopy.layout import ParameterRange
from onecopy.optim.masters import Masters
from onecopy.sharding import FlatBuffer

_ROUND = 1 << 24  # elements a rank takes in one round, or the largest matrix where that is more


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter of two dimensions or more, and the optimizer group it is in."""

    flat: FlatBuffer
    place: ParameterRange
    group: int

    @property
    def work(self) -> int:
        """About the multiplications that Newton-Schulz takes, for dealing out."""
        rows = self.place.shape[0]
        columns = prod(self.place.shape[1:])
        return rows * columns * min(rows, columns)

    def part_of(self, rank: int) -> tuple[int, int]:
        """The bounds of the rank's piece inside the parameter, in elements; (0, 0) when it has none."""
        return self.place.overlap(*self.flat.layout.shard_bounds(rank)) or (0, 0)


def matrices_of(masters: Masters, groups: set[int]) -> list[Matrix]:
    """The parameters of these optimizer groups, the same list on every rank."""
    found = []
    for flat in masters.flats:
        for group, start, stop in flat.group_spans:
            if group in groups:
                found += [Matrix(flat, r, group) for r in flat.layout.ranges if start <= r.start < stop]
    return found


def rounds_of(matrices: Sequence[Matrix], ranks: int) -> list[list[list[Matrix]]]:
    """Cut into rounds, and each round into every rank's own matrices: by work, the largest first to who has least."""
    limit = ranks * max([_ROUND, *(matrix.place.numel for matrix in matrices)])
    rounds: list[list[Matrix]] = []
    elements = limit
    for matrix in matrices:
        if elements + matrix.place.numel > limit:
            rounds.append([])
            elements = 0
        rounds[-1].append(matrix)
        elements += matrix.place.numel
    return [_dealt(members, ranks) for members in rounds]


def _dealt(matrices: Sequence[Matrix], ranks: int) -> list[list[Matrix]]:
    load = [0] * ranks
    dealt: list[list[Matrix]] = [[] for _ in range(ranks)]
    for matrix in sorted(matrices, key=lambda matrix: -matrix.work):
        owner = load.index(min(load))
        load[owner] += matrix.work
        dealt[owner].append(matrix)
    return dealt


def on_owners(
    dealt: Sequence[Sequence[Matrix]],
    communicator: Communicator,
    piece: Callable[[Matrix], torch.Tensor],
    work: Callable[[Matrix, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """One round: `work(matrix, whole)` on each matrix's owner; yields this rank's piece of every result. Collective.

    Args:
        piece: this rank's piece of a matrix, flat; asked only where there is one.
        work: takes the matrix whole, flat, and returns it the same way; both in `dtype`, which is what travels.
    """
    me, ranks = communicator.rank, range(communicator.world_size)

    def length(matrix: Matrix, rank: int) -> int:
        low, high = matrix.part_of(rank)
        return high - low

    to_owners = [sum(length(matrix, me) for matrix in dealt[owner]) for owner in ranks]
    from_ranks = [sum(length(matrix, rank) for matrix in dealt[me]) for rank in ranks]
    mine = [matrix for owner in ranks for matrix in dealt[owner] if length(matrix, me)]
    pieces = torch.cat([torch.empty(0, dtype=dtype, device=communicator.device), *(piece(m).to(dtype) for m in mine)])
    received = communicator.swap(pieces, to_owners, from_ranks, "matrices to their owners")
    wholes = [torch.empty(matrix.place.numel, dtype=dtype, device=communicator.device) for matrix in dealt[me]]
    where = [
        whole[slice(*matrix.part_of(rank))] for rank in ranks for matrix, whole in zip(dealt[me], wholes, strict=True)
    ]
    for target, part in zip(where, received.split([target.numel() for target in where]), strict=True):
        target.copy_(part)
    for whole, matrix in zip(wholes, dealt[me], strict=True):
        whole.copy_(work(matrix, whole))
    returned = communicator.swap(torch.cat([received[:0], *where]), from_ranks, to_owners, "matrices from their owners")
    yield from zip(mine, returned.split([length(matrix, me) for matrix in mine]), strict=True)
