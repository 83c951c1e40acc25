"""What the sharding rooms need from a back end, and what all back ends share: names of ranks, waits that explain themselves."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from onecopy.comm.counters import Counters
from onecopy.comm.long_waits import look_after, look_no_longer, patience, timeout_of
from onecopy.comm.rank_order_sum import RankOrderSum
from onecopy.comm.watchdog import Watchdog
from onecopy.comm.wire import Wire
from onecopy.errors import CommunicationError


class PendingGather(Protocol):
    """An all-gather in flight into one buffer [n]."""

    def wait(self) -> None:
        """Return when the buffer is whole (on an accelerator: when the current stream will see it whole)."""

    def drain(self) -> None:
        """Return when this rank's own part is no longer being read, so that the buffer may be overwritten."""


class PendingReduce(Protocol):
    """A reduce-scatter in flight out of one buffer [n]."""

    def finish(self, out: torch.Tensor, accumulate: bool) -> None:
        """Write (or add) the sum over ranks of this rank's part [n/N] to `out`."""

    def drain(self) -> None:
        """After `finish`: return when nobody reads the buffer any more, so that it may be overwritten."""


class Communicator(ABC):
    """The ranks of one shard group. All methods are collective over the group unless they say otherwise.

    Attributes:
        group: the process group this communicator made for itself.
        rank, world_size: this rank's place in the group.
        counters: bytes and collectives so far.
        waits: how many waits there have been.
        watchdog: what looks after waits that never end, where there is one.
        waiting: what this rank waits for now and since when, for the error of a wait that never ends.
        patience: seconds after which a wait is warned of.
        imagined: the other ranks do not exist (torch's fake back end), so what they would have sent cannot be read.
        needs_scratch: reduces are given room for what the other ranks send.
        reads_in_place: the others read this rank's buffers where they lie, so a buffer is free some time after its use.
    """

    needs_scratch = False
    reads_in_place = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.counters = Counters()
        self.waiting: tuple[str, float] | None = None
        self.waits = 0
        self.watchdog: Watchdog | None = None
        self.imagined = "fake" in str(dist.get_backend_config(group))
        self.sum = RankOrderSum(device)
        self.patience = patience(timeout_of(group, device))
        if self.world_size > 1 and not self.imagined:
            look_after(self)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory [nbytes] of uint8 for a buffer that will be gathered or reduced; not collective."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def unseen_bytes(self) -> int:
        """Bytes of `allocate` that torch's allocator does not count."""
        return 0

    def serve_idle(self) -> None:
        """Called from another thread now and then: do what other ranks wait for and this rank's own calls do not do yet."""
        return  # where nothing waits for this rank's calls

    def wire(self, buffer: torch.Tensor, scratch: torch.Tensor | None = None) -> Wire:
        """Prepare `buffer` [n] for `start_gather` and `start_reduce`; not collective.

        Args:
            scratch: [n - n/N] elements of the buffer's dtype that a reduce may use until it is finished; read only
                where the back end `needs_scratch`, and allocated a reduce there when none is given.
        """
        return Wire(buffer, self.rank, self.world_size, scratch)

    @abstractmethod
    def start_gather(self, wire: Wire, key: int, label: str) -> PendingGather:
        """Start to fill the wire's buffer [n] in place from every rank's own part [n/N], which is already there.

        Args:
            key: a number that is the same on all ranks for this buffer and different for others in flight.
            label: what is gathered, for messages.
        """

    @abstractmethod
    def start_reduce(self, wire: Wire, key: int, label: str) -> PendingReduce:
        """Start to sum the wire's buffer [n] over ranks, each rank receiving its own part."""

    def gather(self, buffer: torch.Tensor, key: int, label: str) -> None:
        """Fill `buffer` [n] in place from every rank's own part, and return when it is whole and free again."""
        pending = self.start_gather(self.wire(buffer), key, label)
        pending.wait()
        pending.drain()

    def sum_vector(self, vector: torch.Tensor, label: str) -> torch.Tensor:
        """The sum over ranks of a small vector, the same bits on every rank; returns a new tensor."""
        if self.world_size == 1:
            return vector.clone()
        count = vector.numel()
        everyone = torch.empty(self.world_size * count, dtype=vector.dtype, device=vector.device)
        everyone[self.rank * count : (self.rank + 1) * count] = vector.flatten()
        self.gather(everyone, 0, label)
        return everyone.view(self.world_size, count).sum(dim=0)

    def broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        """Overwrite `tensor` on every rank with the one of group rank `source`."""
        if self.world_size == 1 or tensor.numel() == 0:
            return
        self.counters.add("broadcast", tensor.nbytes if self.rank == source else 0)
        start = partial(dist.broadcast, tensor, group=self.group, group_src=source, async_op=True)
        self.wait_for(lambda: start().wait(), f"broadcast of {label} from rank {source}")

    def swap(self, sent: torch.Tensor, sent_counts: list[int], counts: list[int], label: str) -> torch.Tensor:
        """Send every rank its part of `sent`, and return what the ranks sent to this one; parts lie in rank order.

        Args:
            sent_counts, counts: elements for each rank, and from each rank.
        """
        received = sent.new_empty(sum(counts))
        self.counters.add("swap", (sent.numel() - sent_counts[self.rank]) * sent.element_size())
        start = partial(dist.all_to_all_single, received, sent, counts, sent_counts, group=self.group, async_op=True)
        self.wait_for(lambda: start().wait(), f"swap of {label}")
        return received

    def read(self, tensor: torch.Tensor) -> list[Any] | None:
        """The values of a small agreed tensor on the host (which waits for the device); None from imagined ranks."""
        return None if self.imagined else tensor.tolist()  # type: ignore[no-any-return]

    def exchange(self, value: Any, label: str) -> list[Any]:
        """Every rank's small Python value, in rank order. For set-up and errors only: it synchronises the host."""
        if self.world_size == 1 or self.imagined:
            return [value] * self.world_size
        values: list[Any] = [None] * self.world_size
        self.wait_for(lambda: dist.all_gather_object(values, value, group=self.group), f"exchange of {label}")
        return values

    def wait_for(self, wait: Callable[[], Any], what: str) -> None:
        """Run a blocking wait; a failure becomes one error that says what was awaited and what the causes are."""
        self.waiting = (what, time.monotonic())
        self.waits += 1
        try:
            wait()
        except RuntimeError as error:
            raise CommunicationError(self.explain(what, error)) from error
        finally:
            self.waiting = None

    def explain(self, what: str, error: RuntimeError) -> str:
        """The sentence for a transfer that failed: what it was, and what the causes may be."""
        if self.watchdog is not None and self.watchdog.finding is not None:
            return (
                f"the ranks wait for each other: {self.watchdog.finding}. They made different calls, or took different "
                "paths through the model; every rank must run the same modules in the same order (make the blocks that "
                "differ one unit with zero_optimization.leaf_module) and call forward, backward, step, save and load alike"
            )
        first_line = str(error).splitlines()[0][:300]
        return (
            f"rank {self.rank} of {self.world_size} waited for the {what} and another rank did not take part. Every rank must make "
            "the same calls in the same order (forward, backward, step, save and load are collective); look at the other "
            f"ranks' output for the first error: a rank that raised, stopped or took another path is the cause ({first_line})"
        )

    def close(self) -> None:
        """Leave the group; collective in that every rank must do it sooner or later. Nothing may be in flight."""
        look_no_longer(self)
        if self.watchdog is not None:
            self.watchdog.stop()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)
        del self.group  # its threads and sockets go with the last reference; None would mean all ranks to torch
