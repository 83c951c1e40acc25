"""A buffer that travels between the ranks, with the views that transfers need: made once, as every step uses it again."""

from typing import Any

import torch


class Wire:
    """A whole buffer, prepared by `Communicator.wire`.

    Attributes:
        buffer: [n], N equal parts in rank order.
        own: this rank's part [n/N] of it.
        place: where it lies in memory that other ranks map too, for the back end that does so; else None.
    """

    __slots__ = ("_parts", "_pieces", "_scratch", "buffer", "own", "place", "rank", "world_size")

    def __init__(self, buffer: torch.Tensor, rank: int, world_size: int, scratch: torch.Tensor | None = None) -> None:
        size = buffer.numel() // world_size
        self.buffer = buffer
        self.own = buffer[rank * size : (rank + 1) * size]
        self.rank = rank
        self.world_size = world_size
        self.place: Any = None
        self._scratch = scratch
        self._parts: tuple[torch.Tensor, ...] = ()
        self._pieces: list[torch.Tensor] = []

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Every rank's part, N of [n/N]; made when a back end first asks, as large worlds have no use for thousands."""
        if not self._parts:
            self._parts = self.buffer.chunk(self.world_size)
        return self._parts

    def pieces(self) -> list[torch.Tensor]:
        """What this rank adds in a reduce, in rank order: its own part, and room for the same part of the other ranks.

        The room is the scratch given to `Communicator.wire`, or new memory where that was none.
        """
        if self._pieces:
            return self._pieces
        size = self.own.numel()
        scratch = self._scratch
        room = self.buffer.new_empty(self.buffer.numel() - size) if scratch is None else scratch
        pieces = [room[place * size : (place + 1) * size] for place in range(self.world_size - 1)]
        pieces.insert(self.rank, self.own)
        if scratch is not None:
            self._pieces = pieces
        return pieces
