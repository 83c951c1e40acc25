"""Sum the ranks' parts in fp32 in rank order 0..N-1, so that every stage and back end gets the same bits."""

from collections.abc import Sequence

import torch

_TILE = 1 << 17  # elements; two fp32 tiles stay inside a core's cache


class RankOrderSum:
    """Adds N pieces into an output tile by tile; the two tiles are its only memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tiles: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
        """`out` [m] = (or +=) the fp32 sum of `pieces`, each [m] of any float dtype, in their order."""
        if all(piece.dtype == torch.float32 for piece in pieces) and out.dtype == torch.float32 and not accumulate:
            self._sum_fp32(pieces, out)
            return
        if self._tiles is None:
            self._tiles = (torch.empty(_TILE, device=self._device), torch.empty(_TILE, device=self._device))
        total_tile, cast_tile = self._tiles
        for start in range(0, out.numel(), _TILE):
            stop = min(start + _TILE, out.numel())
            target = out[start:stop]
            direct = out.dtype == torch.float32 and not accumulate
            total = target if direct else total_tile[: stop - start]
            total.copy_(pieces[0][start:stop])
            for piece in pieces[1:]:
                total.add_(cast_tile[: stop - start].copy_(piece[start:stop]))
            if accumulate:
                target.add_(total)
            elif not direct:
                target.copy_(total)

    @staticmethod
    def _sum_fp32(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if len(pieces) == 1:
            out.copy_(pieces[0])
            return
        torch.add(pieces[0], pieces[1], out=out)
        for piece in pieces[2:]:
            out.add_(piece)
