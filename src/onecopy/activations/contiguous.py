"""One buffer for the inputs of a fixed number of checkpoints, so that what lives long does not fragment the memory."""

from __future__ import annotations

import weakref

import torch

from onecopy.observe.log import log_once

_Size = tuple[int, torch.dtype, torch.device, int]  # which input, and what it is


class Place:
    """A stored tensor inside a buffer; its room is free again when the last reference to this object goes."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class ContiguousBuffers:
    """A buffer of `count` places for each checkpointed input and size, allocated when the first one is stored.

    Attributes:
        count: checkpoints that are alive at a time, `activation_checkpointing.number_checkpoints`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: dict[_Size, list[torch.Tensor]] = {}

    def store(self, flat: torch.Tensor, index: int) -> Place:
        """A copy of `flat` [n], the `index`-th input of a checkpoint, in a place of its buffer."""
        size: _Size = (index, flat.dtype, flat.device, flat.numel())
        free = self._free.get(size)
        if free is None:
            buffer = torch.empty(self.count * flat.numel(), dtype=flat.dtype, device=flat.device)
            free = self._free[size] = list(reversed(buffer.chunk(self.count)))
        if not free:
            log_once(
                ("more checkpoints than places", id(self)),
                f"more than {self.count} checkpoints hold an input of {flat.numel()} elements at a time; the rest is kept "
                "outside the contiguous buffer: raise activation_checkpointing.number_checkpoints",
            )
            return Place(flat.clone())
        home = free.pop()
        place = Place(home.copy_(flat))
        weakref.finalize(place, free.append, home).atexit = False
        return place

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(self.count * numel * dtype.itemsize for _, dtype, _, numel in self._free)
