"""One tensor in a file: what it is, and where its bytes lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes are: `position` is that of its first byte in `file`.

    Attributes:
        strides: in elements, of a tensor that does not lie row by row; None for all others.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    position: int
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)
