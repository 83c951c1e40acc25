"""NCCL, and gloo above a handful of ranks: the library's own collectives, in place in the flat buffers.

Gathers and reduces run on groups of their own, so that a gather need not queue behind a reduce. No stream is handled
here: the back end's stream waits for what the current stream has queued when a collective starts, which is exactly the
last use of a slot, and `wait` makes the current stream wait in turn.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from onecopy.comm import names
from onecopy.comm.communicator import Communicator
from onecopy.comm.wire import Wire


@dataclass(slots=True)
class _Gather:
    communicator: "Collective"
    work: dist.Work
    label: str

    def wait(self) -> None:
        self.communicator.wait_for(self.work.wait, f"gather of {self.label}")

    def drain(self) -> None:
        self.wait()


@dataclass(slots=True)
class _SumOnTheWire:
    """NCCL adds while it sends; each rank's part lands in its own place of the buffer."""

    communicator: "Collective"
    work: dist.Work
    own: torch.Tensor  # [n/N]
    label: str

    def finish(self, out: torch.Tensor, accumulate: bool) -> None:
        self.communicator.wait_for(self.work.wait, f"reduce of {self.label}")
        if accumulate:
            out.add_(self.own)
        else:
            out.copy_(self.own)

    def drain(self) -> None:
        """`finish` has waited for the collective, and the current stream reads the buffer before it writes it again."""


@dataclass(slots=True)
class _SumAtTheOwner:
    """Every part travels to its owner, which adds them in rank order."""

    communicator: "Collective"
    work: dist.Work
    pieces: list[torch.Tensor]  # N of [n/N]
    label: str

    def finish(self, out: torch.Tensor, accumulate: bool) -> None:
        self.communicator.wait_for(self.work.wait, f"reduce of {self.label}")
        self.communicator.sum(self.pieces, out, accumulate)

    def drain(self) -> None:
        """The collective is over when `finish` returns."""


class Collective(Communicator):
    """all_gather_single and reduce_scatter_single (or all_to_all_single where gloo's reduce-scatter is slow)."""

    def __init__(self, group: dist.ProcessGroup, reduce_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.reduce_group = reduce_group
        self._sums_on_the_wire = device.type != "cpu"

    def start_gather(self, wire: Wire, key: int, label: str) -> _Gather:
        work = names.all_gather(wire.buffer, wire.own, group=self.group, async_op=True)
        self.counters.add("agree" if key == 0 else "gather", wire.own.nbytes * (self.world_size - 1))
        return _Gather(self, work, label)

    def start_reduce(self, wire: Wire, key: int, label: str) -> _SumOnTheWire | _SumAtTheOwner:
        buffer, own = wire.buffer, wire.own
        self.counters.add("reduce", own.nbytes * (self.world_size - 1))
        if self._sums_on_the_wire:
            work = names.reduce_scatter(own, buffer, group=self.reduce_group, async_op=True)
            return _SumOnTheWire(self, work, own, label)
        received = torch.empty_like(buffer)  # gloo's all-to-all cannot leave out the rank's own part
        work = dist.all_to_all_single(received, buffer, group=self.reduce_group, async_op=True)
        return _SumAtTheOwner(self, work, list(received.chunk(self.world_size)), label)

    def close(self) -> None:
        if dist.is_initialized() and self.reduce_group is not self.group:
            dist.destroy_process_group(self.reduce_group)
        del self.reduce_group
        super().close()
