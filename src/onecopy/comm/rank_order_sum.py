"""Sum the ranks' parts in fp32 (fp64 ones in fp64) in rank order 0..N-1, so that every stage and back end gets the same bits."""

from collections.abc import Sequence

import torch

_TILE = 1 << 17  # elements; two fp32 tiles stay inside a core's cache


class RankOrderSum:
    """Adds N pieces into an output tile by tile; the two tiles are its only memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tiles: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
        """`out` [m] = (or +=) the sum of `pieces`, each [m] of any float dtype, in their order, in fp32 or `out`'s fp64."""
        exact = torch.float64 if out.dtype == torch.float64 else torch.float32
        if all(piece.dtype == exact for piece in pieces) and out.dtype == exact and not accumulate:
            self._sum_exact(pieces, out)
            return
        if exact not in self._tiles:
            first, second = (torch.empty(_TILE, dtype=exact, device=self._device) for _ in range(2))
            self._tiles[exact] = (first, second)
        total_tile, cast_tile = self._tiles[exact]
        for start in range(0, out.numel(), _TILE):
            stop = min(start + _TILE, out.numel())
            target = out[start:stop]
            direct = out.dtype == exact and not accumulate
            total = target if direct else total_tile[: stop - start]
            total.copy_(pieces[0][start:stop])
            for piece in pieces[1:]:
                total.add_(cast_tile[: stop - start].copy_(piece[start:stop]))
            if accumulate:
                target.add_(total)
            elif not direct:
                target.copy_(total)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tiles made so far."""
        return [tile for tiles in self._tiles.values() for tile in tiles]

    @staticmethod
    def _sum_exact(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if len(pieces) == 1:
            out.copy_(pieces[0])
            return
        torch.add(pieces[0], pieces[1], out=out)
        for piece in pieces[2:]:
            out.add_(piece)
