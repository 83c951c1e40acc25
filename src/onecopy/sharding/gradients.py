"""From autograd's gradients to this rank's fp32 sums: collect a flat buffer's, reduce it, keep the shard.

Note "canonical order". Reductions leave in one order on all ranks (the reverse of the forward), each flat buffer once a
round, whatever gradients this rank happens to have: a buffer that is ready early waits for its predecessors, and a
parameter without a gradient counts as zero. So ranks that used different parameters still take part in the same calls.
`tests/engine/test_unused.py` hangs if a rank may leave a buffer out.

    gradient of a parameter -> copied once (with the cast) into a gradient slot [n] -> reduced -> added to `shard` [n/N]

A window whose gradients stay whole (stages 0 and 1 with several micro-batches, `no_sync`) collects in an fp32 buffer of
its own and is reduced once.

Note "sums on a narrow wire". The sum of many micro-batches may be too large for fp16 although none of them was. It travels
divided by a power of two then, or a loss scale would overflow sooner at stages 0 and 1 than at 2 and 3. All ranks must divide
by the same, so the divisor comes from the configuration, not from which gradients this rank happens to have kept.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from onecopy.comm import Communicator, PendingReduce
from onecopy.layout import Placement
from onecopy.sharding.flat_buffer import FlatBuffer
from onecopy.sharding.region import Region

_TRAVELLING = 2  # reductions under way at most, also where buffers that were half filled leave all at once


class GradientSlot:
    """A buffer that one flat buffer's gradients borrow, with room for what the other ranks send where that is needed.

    Attributes:
        busy: it holds gradients that are not reduced yet.
        last: the reduce that was finished out of it last; other ranks may still read what it sent.
    """

    def __init__(self, memory: torch.Tensor, scratch: torch.Tensor | None) -> None:
        self.memory = memory
        self.scratch = scratch
        self.busy = False
        self.last: PendingReduce | None = None
        self._regions: dict[int, Region] = {}

    def drain(self) -> None:
        """Return when its bytes may be overwritten."""
        if self.last is not None:
            self.last.drain()
            self.last = None

    def region(self, flat: FlatBuffer, dtype: torch.dtype) -> Region:
        """The slot as this flat buffer's gradients in the wire dtype."""
        found = self._regions.get(flat.key)
        if found is None:
            found = self._regions[flat.key] = Region(flat, self.memory, 0, dtype, self.scratch)
        return found


@dataclass(eq=False, slots=True)
class FlatGradient:
    """The gradients of one flat buffer in the window under way.

    Attributes:
        wire_dtype: the dtype its gradients travel in.
        pending: gradients [n] not yet reduced: a slot's region or the whole-gradient buffer; None when there are none.
        written: which parameters' ranges of `pending` hold gradients.
        arrived: which parameters have had a gradient in the backward under way; `missing` counts the others.
        shard: the fp32 sums so far, [n/N] (or [n] where the optimizer's place is whole).
        left: its gradients have been sent for reduction in this window; `reduced`: a sum of them has arrived.
        used: which parameters have had a gradient on this rank in this window.
    """

    flat: FlatBuffer
    wire_dtype: torch.dtype
    pending: torch.Tensor | None = None
    pending_views: list[torch.Tensor] = field(default_factory=list)
    slot: GradientSlot | None = None
    whole: torch.Tensor | None = None
    whole_views: list[torch.Tensor] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    arrived: list[bool] = field(default_factory=list)
    missing: int = 0
    shard: torch.Tensor | None = None
    left: bool = False
    reduced: bool = False
    used: list[bool] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.flat.parameters)
        self.written, self.arrived, self.used = [False] * count, [False] * count, [False] * count
        position = 0
        for parameter in self.flat.layout.ranges:
            if position < parameter.start:
                self.gaps.append((position, parameter.start))
            position = parameter.stop
        if position < self.flat.numel:
            self.gaps.append((position, self.flat.numel))

    def begin_backward(self) -> None:
        self.arrived = [False] * len(self.arrived)
        self.missing = len(self.arrived)

    def zero_the_rest(self) -> None:
        """Zero what no gradient was written to: paddings, and parameters without one."""
        assert self.pending is not None
        for start, stop in self.gaps:
            self.pending[start:stop].zero_()
        for view, written in zip(self.pending_views, self.written, strict=True):
            if not written:
                view.zero_()


class Gradients:
    """All flat gradients of one engine, their slots, and the order in which they are reduced."""

    def __init__(
        self,
        flats: Sequence[FlatBuffer],
        communicator: Communicator,
        placement: Placement,
        wire_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype,
        overlap: bool,
        wait_phase: Callable[[str], object],
    ) -> None:
        self.communicator = communicator
        self.placement = placement
        self.accumulate_dtype = accumulate_dtype
        self.overlap = overlap
        self._wire_dtype = wire_dtype
        self.all = [FlatGradient(flat, wire_dtype or flat.dtype) for flat in flats]
        self.of = {gradient.flat.key: gradient for gradient in self.all}
        self.alone = communicator.world_size == 1
        self.deferring = False
        self.unreduced = False  # gradients were left whole since the last round
        self.rounds = 0
        self.micro_batches_in_window: Callable[[], int] = lambda: 1  # the same on all ranks
        self.anything_arrived = False
        self._head = 0
        self._in_flight: deque[tuple[FlatGradient, GradientSlot, PendingReduce, float]] = deque()
        self._wait_phase = wait_phase
        self._slots: list[GradientSlot] = []
        if not self.alone:
            self._fit_slots()

    def set_order(self, flats: Sequence[FlatBuffer]) -> None:
        """Reduce in this order from the next round on; the same on all ranks."""
        self.all = [self.of[flat.key] for flat in flats]

    def include(self, flats: Sequence[FlatBuffer], order: Sequence[FlatBuffer]) -> None:
        """Let these be reduced too, all in `order`, from the window that begins now on; the same on all ranks."""
        self.of |= {flat.key: FlatGradient(flat, self._wire_dtype or flat.dtype) for flat in flats}
        self.set_order(order)
        if not self.alone and flats:
            self._fit_slots()

    # ------------------------------------------------------------------------------------------------- one backward
    def begin_backward(self, deferring: bool) -> None:
        """A backward begins; with `deferring` its gradients stay whole on this rank."""
        self.deferring = deferring
        self.anything_arrived = False
        self._head = 0
        for gradient in self.all:
            gradient.begin_backward()

    def receive(self, gradient: FlatGradient, index: int, value: torch.Tensor) -> None:
        """Take parameter `index`'s gradient of this backward: copied, or added to what is not reduced yet."""
        if gradient.pending is None:
            self._open(gradient)
        view = gradient.pending_views[index]
        if value.layout is not torch.strided:
            value = value.to_dense()
        if gradient.written[index]:
            view.add_(value)
        else:
            view.copy_(value)
            gradient.written[index] = True
        gradient.used[index] = True
        self.anything_arrived = True
        if not gradient.arrived[index]:
            gradient.arrived[index] = True
            gradient.missing -= 1
            if gradient.missing == 0:
                self.advance()

    def advance(self, passed: Callable[[FlatGradient], bool] = lambda gradient: False) -> None:
        """Reduce every buffer whose predecessors have left and which is complete, or has `passed`: no more will come."""
        while not self.deferring and self._head < len(self.all):
            gradient = self.all[self._head]
            if gradient.missing and not passed(gradient):
                return
            self._head += 1
            self._launch(gradient)

    def end_backward(self) -> None:
        """The backward is over: what is left leaves, and what came after its buffer had left goes in a second round."""
        if self.deferring:
            self.unreduced = True
            return
        left, self._head = self.all[self._head :], len(self.all)
        for gradient in left:
            self._launch(gradient)
        for gradient in self.all:
            if gradient.pending is not None and any(gradient.written) and not (self.alone and gradient.reduced):
                self._launch(gradient)
        self.rounds += 1
        self.unreduced = False

    # -------------------------------------------------------------------------------------------------------- the step
    def settle(self) -> None:
        """Finish all reductions of the window, so that every `shard` is its sum. Collective at a boundary."""
        if self.unreduced or self.rounds == 0:
            self.begin_backward(deferring=False)
            self.end_backward()
        while self._in_flight:
            self._finish_oldest()
        if not self.placement.optimizer.sharded and not self.alone:
            with_shards = [(g, g.shard) for g in self.all if g.shard is not None]
            wires = [(g.flat, self.communicator.wire(shard)) for g, shard in with_shards]
            gathers = [self.communicator.start_gather(wire, flat.key, flat.label) for flat, wire in wires]
            for gather in gathers:
                gather.wait()
                gather.drain()

    def reset(self, keep_memory: bool) -> None:
        """Forget the window's gradients; with `keep_memory` the shards' memory serves the next window."""
        while self._in_flight:
            self._finish_oldest()
        for gradient in self.all:
            if gradient.slot is not None:
                gradient.slot.busy = False
            gradient.slot, gradient.pending, gradient.pending_views = None, None, []
            gradient.left = gradient.reduced = False
            gradient.written = [False] * len(gradient.written)
            gradient.used = [False] * len(gradient.used)
            if not keep_memory:
                gradient.shard = gradient.whole = None
                gradient.whole_views = []
        self.rounds = 0
        self.unreduced = False

    def free(self) -> None:
        """Give all memory back; no further gradient may come."""
        self.reset(keep_memory=False)
        self._drain_slots()
        self._slots.clear()

    def any_missing(self) -> bool:
        """Whether this rank had no gradient for some parameter in this window."""
        return any(not all(gradient.used) for gradient in self.all)

    @property
    def nbytes(self) -> int:
        """Bytes of gradient slots, shards and whole-gradient buffers now."""
        slots = sum(slot.memory.nbytes + (0 if slot.scratch is None else slot.scratch.nbytes) for slot in self._slots)
        held = [tensor for gradient in self.all for tensor in (gradient.shard, gradient.whole) if tensor is not None]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
        return slots + sum(storages.values())

    # -------------------------------------------------------------------------------------------------------- internals
    def _open(self, gradient: FlatGradient) -> None:
        """Give the flat gradient a buffer to collect in."""
        gradient.written = [False] * len(gradient.written)
        if self.alone or self.deferring:
            self._open_whole(gradient)
        else:
            gradient.slot = self._acquire()
            region = gradient.slot.region(gradient.flat, gradient.wire_dtype)
            gradient.pending, gradient.pending_views = region.wire.buffer, region.views

    def _open_whole(self, gradient: FlatGradient) -> None:
        if self.alone:
            if gradient.shard is None:
                gradient.shard = self._new_sum(gradient)
            gradient.whole = gradient.shard
        elif gradient.whole is None or gradient.left:  # a sum of this window lies in the old one, or soon will
            gradient.whole_views = []
            gradient.whole = torch.empty(
                gradient.flat.numel, dtype=self._sum_dtype(gradient), device=self.communicator.device
            )
        assert gradient.whole is not None
        if not gradient.whole_views:
            gradient.whole_views = gradient.flat.views(gradient.whole)
        gradient.pending, gradient.pending_views = gradient.whole, gradient.whole_views

    def _launch(self, gradient: FlatGradient) -> None:
        if gradient.pending is None:
            self._open(gradient)
        gradient.zero_the_rest()
        if self.alone:  # the buffer is the sum: it stays open for the window's further gradients
            gradient.written = [True] * len(gradient.written)
            gradient.reduced = True
            return
        slot = gradient.slot or self._acquire()
        region = slot.region(gradient.flat, gradient.wire_dtype)
        divisor = self._divisor_on_the_wire(gradient)
        assert gradient.pending is not None
        if divisor != 1.0:
            torch.mul(gradient.pending, 1.0 / divisor, out=region.wire.buffer)
        elif gradient.slot is None:
            region.wire.buffer.copy_(gradient.pending)
        if gradient.whole is not None and gradient.shard is None:
            gradient.shard = self._new_sum(gradient)  # now, while `whole` is the buffer that has just left
        gradient.left = True
        flat = gradient.flat
        pending = self.communicator.start_reduce(region.wire, flat.key, flat.label)
        gradient.slot, gradient.pending = None, None
        self._in_flight.append((gradient, slot, pending, divisor))
        while len(self._in_flight) > (_TRAVELLING if self.overlap else 0):
            self._finish_oldest()

    def _divisor_on_the_wire(self, gradient: FlatGradient) -> float:
        """A power of two that brings the sum of a window's micro-batches down to the size of one."""
        if gradient.wire_dtype != torch.float16 or self.placement.gradients.sharded:
            return 1.0
        return float(1 << (self.micro_batches_in_window() - 1).bit_length())

    def _finish_oldest(self) -> None:
        gradient, slot, pending, divisor = self._in_flight.popleft()
        if gradient.shard is None:
            gradient.shard = self._new_sum(gradient)
        own = gradient.flat.owned(gradient.shard)
        if gradient.reduced and divisor != 1.0:
            own.mul_(1.0 / divisor)
        with self._wait_phase("reduce wait"):  # type: ignore[attr-defined]
            pending.finish(own, accumulate=gradient.reduced)
        if divisor != 1.0:
            own.mul_(divisor)
        gradient.reduced = True
        slot.busy, slot.last = False, pending

    def _acquire(self) -> GradientSlot:
        """A free slot, the one that has been free for longest; when two travel, the older one's arrival is awaited."""
        while True:
            if len(self._in_flight) >= _TRAVELLING:
                self._finish_oldest()
            for place, slot in enumerate(self._slots):
                if not slot.busy:
                    slot.drain()
                    slot.busy = True
                    self._slots.append(self._slots.pop(place))
                    return slot
            if self._in_flight:
                self._finish_oldest()
            else:  # more buffers are half filled at once than there are slots: parallel branches
                self._slots.append(self._new_slot())

    def _usual_count(self) -> int:
        """Two: one fills while the other travels; a third where the others may still read the one before."""
        return min(3 if self.communicator.reads_in_place else 2, len(self.all))

    def _fit_slots(self) -> None:
        """Slots for what is reduced now: those there are, where the largest fits, as shared memory stays mapped by others."""
        if any(slot.memory.nbytes < self._largest() for slot in self._slots):
            self._drain_slots()
            self._slots.clear()
        self._slots += [self._new_slot() for _ in range(self._usual_count() - len(self._slots))]

    def _drain_slots(self) -> None:
        for slot in self._slots:
            slot.drain()

    def _largest(self) -> int:
        return max(g.flat.numel * g.wire_dtype.itemsize for g in self.all)

    def _new_slot(self) -> GradientSlot:
        largest, communicator = self._largest(), self.communicator
        scratch = None
        if communicator.needs_scratch:
            others = largest // communicator.world_size * (communicator.world_size - 1)
            scratch = torch.empty(others, dtype=torch.uint8, device=communicator.device)
        return GradientSlot(communicator.allocate(largest), scratch)

    def _new_sum(self, gradient: FlatGradient) -> torch.Tensor:
        """Room for the sums: the whole-gradient buffer's own part where there is one (it has left by then), else new."""
        flat = gradient.flat
        if gradient.whole is not None:
            return gradient.whole if flat.optimizer_whole else gradient.whole[flat.own]
        numel = flat.numel if flat.optimizer_whole else flat.layout.shard_numel
        return torch.empty(numel, dtype=self._sum_dtype(gradient), device=self.communicator.device)

    def _sum_dtype(self, gradient: FlatGradient) -> torch.dtype:
        return torch.float64 if gradient.flat.dtype == torch.float64 else self.accumulate_dtype
