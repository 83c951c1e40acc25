"""Training state moved to the host for a while: the memory of tensors goes and comes back, the tensors stay.

A tensor's storage is copied to the host and shrunk to nothing; every view of it (masters are views, parameters are) comes
to life again when the storage gets its bytes back. So nothing has to be bound anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


def chosen_states(include: Any) -> frozenset[str]:
    """The kinds named by an iterable of names or of DeepSpeed's enum; all by default. Raises ValueError for others."""
    if include is None:
        return frozenset(KINDS)
    names = [str(getattr(one, "value", one)) for one in include]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ValueError(f"include names {unknown[0]!r}; it may hold {', '.join(KINDS)}")
    return frozenset(names)


class ParkedStates:
    """What of one engine's state is away now.

    Attributes:
        away: the kinds that are away.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.away: set[str] = set()
        self._copies: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # bytes of a storage, and their copy

    def park(self, kinds: frozenset[str], pin_memory: bool, non_blocking: bool) -> None:
        """Move the kinds that are not away yet."""
        runtime = self.engine.runtime
        runtime.recover()  # a forward without a backward still holds what the root owns
        runtime.release_all()
        for slot in runtime.slots.slots:
            slot.drain()  # a gather started ahead must not arrive where no memory is
        for unit in self.engine.units:
            unit.finish_refresh()
        seen = {tensor.untyped_storage()._cdata for tensor, _ in self._copies}
        for kind in sorted(kinds - self.away):
            self.away.add(kind)
            for tensor, needed in self._tensors(kind):
                storage = tensor.untyped_storage()
                # Memory that ranks of one machine share is on the host and cannot shrink.
                if storage._cdata not in seen and storage.nbytes() and storage.resizable():
                    seen.add(storage._cdata)
                    self._copies.append(_emptied(tensor, needed, pin_memory, non_blocking))
        if self.engine.device.type != "cpu":
            torch.accelerator.empty_cache()  # the room is meant for others

    def bring_back(self, non_blocking: bool) -> None:
        """Give every storage its bytes again."""
        for everything, copy in self._copies:
            storage = everything.untyped_storage()
            storage.resize_(everything.numel())
            if copy is not None:
                everything.copy_(copy, non_blocking=non_blocking)
        if not non_blocking and self.engine.device.type != "cpu":
            torch.accelerator.synchronize()
        self._copies.clear()
        self.away.clear()

    def _tensors(self, kind: str) -> Iterator[tuple[torch.Tensor, bool]]:
        """The tensors of one kind on this device, and whether what they hold is needed again."""
        engine = self.engine
        flats = [flat for unit in engine.units for flat in unit.buffers]
        if kind == "optim_states":
            found = [value for state in engine.optimizer.state.values() for value in state.values()]  # type: ignore[union-attr]
            yield from ((v, True) for v in found if isinstance(v, torch.Tensor) and v.device == engine.device)
        elif kind == "hp_params":
            yield from ((flat.master, True) for flat in flats if flat.master is not None)
        elif kind == "lp_params":
            yield from ((t, True) for flat in flats for t in (flat.whole, flat.shard) if t is not None)
            yield from ((slot.memory, False) for slot in engine.runtime.slots.slots)
        elif kind == "lp_grads":
            yield from ((t, True) for g in engine.gradients.all for t in (g.shard, g.whole) if t is not None)
        else:
            both = (t for slot in engine.gradients._slots for t in (slot.memory, slot.scratch))
            yield from ((t, False) for t in both if t is not None)


@torch.no_grad()
def _emptied(
    tensor: torch.Tensor, needed: bool, pin_memory: bool, non_blocking: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All bytes of the tensor's storage, now without memory, and their copy on the host if it is needed."""
    storage = tensor.untyped_storage()
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    copy = None
    if needed:
        pinned = pin_memory and tensor.device.type != "cpu"
        copy = torch.empty(everything.numel(), dtype=torch.uint8, pin_memory=pinned)
        copy.copy_(everything, non_blocking=non_blocking and pinned)
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream().synchronize()
    storage.resize_(0)
    return everything, copy
