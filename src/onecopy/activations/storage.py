"""Where a checkpointed input waits for its backward: as it is, cut into parts over ranks, on the host, in one buffer.

Note "callers' tensors". A stored input is a copy, or the very tensor; nothing here writes to a tensor of the caller,
changes its shape or frees its memory. `tests/activations/test_storage.py` compares before and after.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from onecopy.activations.contiguous import ContiguousBuffers, Place
from onecopy.comm.model_parallel import ModelParallel
from onecopy.errors import ModelError


@dataclass(eq=False)
class Stored:
    """One input that is not kept as it is.

    Attributes:
        part: the elements that this rank keeps, flat, on the device they are kept on.
        shape, stride, device: of the input; `numel` its elements.
    """

    part: torch.Tensor | Place
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    numel: int
    parts: int

    @property
    def flat(self) -> torch.Tensor:
        return self.part.tensor if isinstance(self.part, Place) else self.part


@dataclass(frozen=True)
class Kept:
    """An input that stays as it is, with its version: torch leaves this check to who has hooks on saved tensors."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise ModelError(
                f"an input of shape {list(self.tensor.shape)} of a checkpointed function was changed in place after the call, so "
                "the call cannot be repeated for backward; let the caller make a new tensor"
            )
        return self.tensor


@dataclass
class Held:
    """Bytes of stored inputs on this rank: now, and at most so far."""

    now: int = 0
    peak: int = 0

    def add(self, stored: Stored) -> None:
        nbytes = stored.flat.nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(stored, self._drop, nbytes).atexit = False

    def _drop(self, nbytes: int) -> None:
        self.now -= nbytes


@dataclass(eq=False)
class Storage:
    """Puts inputs away and brings them back.

    Attributes:
        ranks: the model-parallel ranks that keep a part each; None: this rank keeps all of it.
        to_host: keep it in host memory (pinned, beside an accelerator).
        buffers: keep it in one buffer a size.
    """

    ranks: ModelParallel | None = None
    to_host: bool = False
    buffers: ContiguousBuffers | None = None
    held: Held = field(default_factory=Held)
    _seen: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    _checked: set[tuple[torch.Size, torch.dtype]] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Whether every input is kept as it is."""
        return self.ranks is None and self.buffers is None and not self.to_host

    def put(self, tensor: torch.Tensor, index: int) -> Kept | Stored:
        """What to keep of `tensor`, the `index`-th tensor among a checkpoint's inputs. With `ranks` collective."""
        if not self._moves(tensor):
            return Kept(tensor, tensor._version)
        version, reference = self._seen.get(tensor, (-1, None))
        known: Stored | None = reference() if reference is not None else None
        if known is not None and version == tensor._version:  # a mask, say, that every block is given
            return known
        stored = self._store(tensor, index)
        self.held.add(stored)
        self._seen[tensor] = (tensor._version, weakref.ref(stored))
        return stored

    def get(self, kept: Kept | Stored) -> torch.Tensor:
        """The whole input again. With `ranks` collective."""
        if isinstance(kept, Kept):
            return kept.unchanged()
        part = kept.flat.to(kept.device, non_blocking=True)
        if kept.parts > 1:
            assert self.ranks is not None
            part = self.ranks.gather(part).view(-1)[: kept.numel]
        return part.as_strided(kept.shape, kept.stride)

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Activations only: weights stay alive anyway, and integers (tokens, masks) are small."""
        if not is_activation(tensor) or tensor.numel() < (self.ranks.world_size if self.ranks is not None else 1):
            return False
        return self.ranks is not None or self.buffers is not None or tensor.device.type != "cpu"

    def _store(self, tensor: torch.Tensor, index: int) -> Stored:
        with torch.no_grad():
            flat, stride = _flat(tensor.detach())
            parts = 1
            if self.ranks is not None:
                self._check_replicated(flat, tensor)
                parts = self.ranks.world_size
                flat = _part(flat, self.ranks)
            kept: torch.Tensor | Place
            if self.to_host and tensor.device.type != "cpu":
                kept = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
            elif self.buffers is not None:
                kept = self.buffers.store(flat, index)
            else:
                kept = flat.clone()
            return Stored(kept, tensor.shape, stride, tensor.device, tensor.numel(), parts)

    def _check_replicated(self, flat: torch.Tensor, tensor: torch.Tensor) -> None:
        """Once a shape: the model-parallel ranks hold the same input, or its parts would not be its parts.

        Raises:
            ModelError: they do not, on every rank.
        """
        if (tensor.shape, tensor.dtype) in self._checked:
            return
        self._checked.add((tensor.shape, tensor.dtype))
        assert self.ranks is not None
        sums = self.ranks.gather(torch.stack([flat.double().sum(), flat.double().abs().sum()]))
        if not torch.equal(sums, sums[:1].expand_as(sums)) and bool(torch.isfinite(sums).all()):
            raise ModelError(
                f"a checkpointed input of shape {list(tensor.shape)} differs between the model-parallel ranks, so it cannot be "
                "partitioned over them; set activation_checkpointing.partition_activations to false"
            )


PLAIN: set[type] = {torch.Tensor}
"""Classes of tensors that can be put away. A kind of plain tensor without memory, say, is entered by whoever makes it."""


def is_activation(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor of floating-point numbers, and no weight."""
    plain = type(tensor) in PLAIN and not isinstance(tensor, torch.nn.Parameter)
    return plain and tensor.dtype.is_floating_point and tensor.layout is torch.strided


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """All elements in the order they lie in memory, [n], and the strides that bring the shape back."""
    dense = torch.empty_like(tensor, device="meta").stride()  # the same strides if there are no gaps and no overlaps
    if dense != tensor.stride():
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()


def _part(flat: torch.Tensor, ranks: ModelParallel) -> torch.Tensor:
    """This rank's part [ceil(n/M)]; the last one is filled up with zeros."""
    size = -(-flat.numel() // ranks.world_size)
    part = flat[ranks.rank * size : (ranks.rank + 1) * size]
    return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])
