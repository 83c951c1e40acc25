"""What operators between two matrix products move when a compiler makes one kernel of them: what comes in and what leaves.

torch.compile fuses neighbouring pointwise operators and reductions: a value that is made and used up in between never
reaches memory. What a later kernel reads was written once. Attention, matrix products and waits for transfers end a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from onecopy.observe.ledger import tensors_in


class Fusing:
    """Counts bytes operator by operator, in the order they run; storages are told apart by address while they live.

    Attributes:
        between: no operator has run since the last product: the next one begins a kernel.
    """

    def __init__(self) -> None:
        self.between = True
        self._kernel = 0
        self._made_by: dict[int, int] = {}  # storage: the kernel that made it
        self._unwritten: dict[int, int] = {}  # storage: bytes that its kernel writes once somebody else reads it
        self._read: set[int] = set()  # storages that this kernel has read

    def product(self, inputs: Any, result: Any) -> int:
        """Bytes that kernels before a matrix product or attention write for it; its own traffic is not counted here."""
        self.between = True
        self._kernel += 1
        self._read.clear()
        for key, _ in _storages(result):
            self._made_by.pop(key, None)
            self._unwritten.pop(key, None)
        return sum(self._unwritten.pop(key, 0) for key, _ in _storages(inputs))

    def operator(self, inputs: Any, result: Any, in_place: bool) -> int:
        """Bytes that an operator adds to those of its kernel."""
        self.between = False
        moved = 0
        for key, nbytes in _storages(inputs):
            if self._made_by.get(key) != self._kernel and key not in self._read:
                self._read.add(key)
                moved += nbytes + self._unwritten.pop(key, 0)
        for key, nbytes in _storages(result):
            if self._made_by.get(key) == self._kernel and (in_place or key in self._unwritten):
                continue
            if in_place:  # what rests in memory is written back
                moved += nbytes
            else:
                self._made_by[key] = self._kernel
                self._unwritten[key] = nbytes
        return moved


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """(storage, bytes of the tensor) of every tensor in the arguments or results of an operator."""
    for tensor in tensors_in(value):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage()._cdata, int(tensor.numel()) * int(tensor.element_size())
