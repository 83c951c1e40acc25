"""Ranks of one machine: each reads the others' parts straight out of their memory, and no byte goes through a socket.

Gloo's loopback copies every byte twice in the kernel and wakes threads that take cores from the computation. Here the
buffers that travel (slots, gradient slots, weights kept whole) lie in anonymous files that all ranks map. To gather is to
copy each other rank's part; to reduce is to add them where they lie. What a rank has ready, and what it has finished
reading, stands on its board: a table of 64-bit numbers that the others map too.

    post    my part is in place: where it lies, then its number on my board     -> the others may read it
    read    another rank's part has been copied or added: a number on my board  -> that rank may overwrite it

A blocked wait also serves the other transfers in flight, so that ranks whose calls come in another order do not block
each other. While a rank is elsewhere (in a collective of the program's own, say) the watchdog's thread serves for it, so
that the others may read refreshed weights and get their gradients' buffers back.

Only for processors that show stores to others in program order (x86-64): elsewhere, and wherever a rank cannot open
another's files (other machines, other containers), `point_to_point.py` is used, as it is here for buffers that are not
shared.
"""

import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import torch
import torch.distributed as dist

from onecopy.comm.communicator import PendingGather, PendingReduce
from onecopy.comm.point_to_point import PointToPoint
from onecopy.comm.shared_files import SharedFile, allow_many_files, lives, open_of
from onecopy.comm.wire import Wire
from onecopy.errors import CommunicationError
from onecopy.observe.ledger import ELSEWHERE

_TAGS = 1 << 15  # transfers with a higher tag go through sockets
_POSTED, _FILE, _OFFSET, _READ = range(4)  # columns of the board; from _READ on one a rank
_CLOSED = -1  # in place of a board's signature: its rank has left
_SPINS = 20  # looks before a waiting rank begins to sleep between them
_NAP_SECONDS = 50e-6
_LONGEST_NAP_SECONDS = 1e-3  # naps grow with the wait, as the core may be wanted elsewhere
_PATIENCE_SECONDS = 0.25  # after which a waiting rank copies others' gradients too, so that they get their buffers back
_LIVENESS_SECONDS = 0.5  # how often a waiting rank looks whether the others still live


def can_share(device: torch.device, world_size: int) -> bool:
    """Whether this rank's system has what sharing needs; the other ranks must agree."""
    return (
        device.type == "cpu"
        and world_size > 1
        and hasattr(os, "memfd_create")
        and platform.machine() in ("x86_64", "AMD64")
    )


@dataclass(eq=False, slots=True)
class _Transfer:
    """One gather or reduce in flight: the `count`-th of its tag.

    Attributes:
        unread: ranks whose parts have not been taken yet.
        overdue: it was in flight already when the watchdog's thread came by last.
    """

    communicator: "SharedMemory"
    tag: int
    count: int
    unread: list[int]
    label: str
    overdue: bool = field(default=False, init=False)

    def ready(self, peer: int) -> bool:
        return bool(self.communicator.boards[peer][self.tag, _POSTED] >= self.count)

    def acknowledge(self, peer: int) -> None:
        communicator = self.communicator
        communicator.board[self.tag, _READ + peer] = self.count

    def all_have_read(self) -> bool:
        """Ranks that have left never will, and need not."""
        communicator = self.communicator
        column = _READ + communicator.rank
        return all(
            communicator.boards[peer][self.tag, column] >= self.count
            for peer in communicator.peers
            if peer not in communicator.gone
        )

    def progress(self) -> bool:
        """Take what has become ready; whether nothing is left to take."""
        raise NotImplementedError

    def _await_readers(self, kind: str) -> None:
        self.communicator.wait_until(self.all_have_read, f"{kind} of {self.label}")


@dataclass(eq=False, slots=True)
class _Gather(_Transfer):
    parts: tuple[torch.Tensor, ...]  # N of [n/N]

    def progress(self) -> bool:
        with self.communicator.serving:
            for peer in [peer for peer in self.unread if self.ready(peer)]:
                part = self.parts[peer]
                part.copy_(self.communicator.part_of(peer, self.tag, part))
                self.acknowledge(peer)
                self.unread.remove(peer)
            return not self.unread

    def wait(self) -> None:
        self.communicator.wait_until(self.progress, f"gather of {self.label}")

    def drain(self) -> None:
        self.wait()
        self._await_readers("gather")


@dataclass(eq=False, slots=True)
class _Reduce(_Transfer):
    own: torch.Tensor  # [n/N]: my gradients of my part
    taken: dict[int, torch.Tensor] = field(default_factory=dict)  # copies of other ranks', where those could not wait

    def progress(self) -> bool:
        """Serve ranks that wait for their buffer while this rank is not yet ready to add."""
        with self.communicator.serving:
            for peer in [peer for peer in self.unread if self.ready(peer)]:
                self.taken[peer] = self._of(peer).clone()
                self.acknowledge(peer)
                self.unread.remove(peer)
            return not self.unread

    def _of(self, peer: int) -> torch.Tensor:
        communicator = self.communicator
        return communicator.part_of(peer, self.tag, self.own, place=communicator.rank)

    def _all_ready(self) -> bool:
        return all(self.ready(peer) for peer in self.unread)

    def finish(self, out: torch.Tensor, accumulate: bool) -> None:
        communicator = self.communicator
        communicator.leave(self)  # what is ready from now on is added where it lies
        communicator.wait_until(self._all_ready, f"reduce of {self.label}")
        pieces = {communicator.rank: self.own, **self.taken, **{peer: self._of(peer) for peer in self.unread}}
        communicator.sum([pieces[rank] for rank in range(communicator.world_size)], out, accumulate)
        for peer in self.unread:
            self.acknowledge(peer)
        self.unread.clear()
        self.taken.clear()

    def drain(self) -> None:
        self._await_readers("reduce")


class SharedMemory(PointToPoint):
    """Transfers through memory that all ranks of the group map.

    Attributes:
        board: this rank's own numbers [tags, 3 + world size]; `boards` has every rank's.
        gone: ranks whose process has ended, or that have closed their communicator, as far as this rank has noticed.
        serving: held while parts are taken, which two threads do.
    """

    needs_scratch = False
    reads_in_place = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float) -> None:
        super().__init__(group, device)
        self._timeout_seconds = timeout_seconds
        self._files: list[SharedFile] = []
        self._place_of: dict[int, SharedFile] = {}  # by the address of its first byte
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._counts: dict[int, int] = {}
        self._last: dict[int, _Transfer] = {}
        self._in_flight: list[_Transfer] = []
        self._processes: list[int] = []
        self.boards: list[numpy.ndarray] = []
        self.board = numpy.empty((0, 0), dtype=numpy.int64)
        self.gone: dict[int, str] = {}
        self.serving = threading.RLock()
        self._quiet = threading.Event()
        self._closer = weakref.finalize(self, _close_all, self._files, self._quiet, self.serving)

    @classmethod
    def try_to_connect(
        cls, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float
    ) -> "SharedMemory | None":
        """Map each other's boards; None, on every rank, where one of them cannot. Collective."""
        self = cls(group, device, timeout_seconds)
        able = can_share(device, self.world_size)
        if able:
            allow_many_files()
        shape = (_TAGS, _READ + self.world_size)
        mine: SharedFile | None = None
        try:
            mine = self._new_file(shape[0] * shape[1] * 8) if able else None
        except CommunicationError:
            able = False  # said to the others below; all use sockets then
        told = self.exchange((os.getpid(), mine.number if mine else -1, os.getpid() + 7 * self.rank), "boards")
        self._processes = [process for process, _, _ in told]
        if mine is not None:
            ELSEWHERE.add(mine.bytes.untyped_storage().data_ptr())
            self.boards = [numpy.empty(0)] * self.world_size
            self.board = self.boards[self.rank] = mine.bytes.numpy().view(numpy.int64).reshape(shape)
            self.board[0, 0] = told[self.rank][2]
        self.exchange(None, "boards written")
        if mine is not None:
            able = all(self._map_board(peer, told[peer], shape) for peer in self.peers)
        if all(self.exchange(able, "boards read")):
            return self
        self._closer()
        return None

    def _map_board(self, peer: int, told: tuple[int, int, int], shape: tuple[int, int]) -> bool:
        """Whether the file of that number in that process is that rank's board (and not of a namesake elsewhere)."""
        process, number, signature = told
        try:
            board = open_of(process, number).numpy().view(numpy.int64).reshape(shape)
        except (OSError, ValueError):
            return False
        self.boards[peer] = board
        return bool(board[0, 0] == signature)

    # ----------------------------------------------------------------------------------------------------------- memory
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeros; the system gives the memory when it is used first, so a rank that loads weights holds only its shards."""
        file = self._new_file(nbytes)
        self._place_of[file.bytes.data_ptr()] = file
        return file.bytes[:nbytes]

    @property
    def unseen_bytes(self) -> int:
        return sum(file.nbytes for file in self._place_of.values())

    def _new_file(self, nbytes: int) -> SharedFile:
        file = SharedFile(nbytes)
        self._files.append(file)
        return file

    def part_of(self, peer: int, tag: int, like: torch.Tensor, place: int | None = None) -> torch.Tensor:
        """The part [n/N] at `place` (default: its own) of the buffer that rank `peer` posted under `tag`."""
        board = self.boards[peer]
        number, offset = int(board[tag, _FILE]), int(board[tag, _OFFSET])
        found = self._mapped.get((peer, number))
        if found is None:
            try:
                found = self._mapped[(peer, number)] = open_of(self._processes[peer], number)
            except OSError as error:
                raise CommunicationError(
                    f"the memory of rank {peer} cannot be mapped ({error}): as a rule its process has ended; look at its output"
                ) from error
        start = offset + (peer if place is None else place) * like.nbytes
        return found[start : start + like.nbytes].view(like.dtype)

    # -------------------------------------------------------------------------------------------------------- transfers
    def wire(self, buffer: torch.Tensor, scratch: torch.Tensor | None = None) -> Wire:
        wire = super().wire(buffer)
        file = self._place_of.get(buffer.untyped_storage().data_ptr())
        if file is not None:
            wire.place = (file.number, buffer.data_ptr() - file.bytes.data_ptr())
        return wire

    def start_gather(self, wire: Wire, key: int, label: str) -> PendingGather:
        if wire.place is None or 2 * key >= _TAGS or key == 0:
            return super().start_gather(wire, key, label)
        gather = _Gather(self, 2 * key, self._next(2 * key), list(self.peers), label, wire.parts)
        self._post(gather, wire)
        self.counters.add("gather", wire.own.nbytes * len(self.peers))
        return gather

    def start_reduce(self, wire: Wire, key: int, label: str) -> PendingReduce:
        if wire.place is None or 2 * key + 1 >= _TAGS:
            return super().start_reduce(wire, key, label)
        reduce = _Reduce(self, 2 * key + 1, self._next(2 * key + 1), list(self.peers), label, wire.own)
        self._post(reduce, wire)
        self.counters.add("reduce", wire.own.nbytes * len(self.peers))
        return reduce

    def _next(self, tag: int) -> int:
        """The number of a new transfer under `tag`, after its predecessor has been read by all."""
        last = self._last.get(tag)
        if last is not None:
            if isinstance(last, _Gather):
                last.drain()
            else:
                last._await_readers("reduce")
        self._counts[tag] = count = self._counts.get(tag, 0) + 1
        return count

    def _post(self, transfer: _Transfer, wire: Wire) -> None:
        self.serve()
        row = self.board[transfer.tag]
        row[_FILE], row[_OFFSET] = wire.place
        row[_POSTED] = transfer.count  # last: it says that the rest is there
        self._last[transfer.tag] = transfer
        self._in_flight.append(transfer)

    def leave(self, transfer: _Transfer) -> None:
        """Serve it no longer; its own call does the rest."""
        with self.serving:
            if transfer in self._in_flight:
                self._in_flight.remove(transfer)

    def serve(self, reduces: bool = False) -> None:
        """Take what other ranks have posted, so that they may go on; gradients only on request, as it costs a copy."""
        if self._in_flight:
            self._in_flight = [
                transfer
                for transfer in self._in_flight
                if not ((reduces or isinstance(transfer, _Gather)) and transfer.progress())
            ]

    def serve_idle(self) -> None:
        """Take what other ranks have posted from another thread: they need not wait until this rank's own call comes by.

        Gradients are copied for that, so only where this rank has stayed away from them since the last look.
        """
        for transfer in list(self._in_flight):
            with self.serving:
                if transfer not in self._in_flight or self._quiet.is_set():
                    continue
                if transfer.overdue or isinstance(transfer, _Gather):
                    transfer.progress()
                transfer.overdue = True

    # ------------------------------------------------------------------------------------------------------------ waits
    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Return when `done()`; a rank that dies, stays away for too long or blocks all others becomes one error."""
        if not done():
            self.wait_for(lambda: self._poll(done), what)

    def _poll(self, done: Callable[[], bool]) -> None:
        begun = looked = time.monotonic()
        spins = 0
        while not done():
            now = time.monotonic()
            self.serve(reduces=now - begun > _PATIENCE_SECONDS)
            spins += 1
            if spins < _SPINS:
                continue
            time.sleep(min(max(_NAP_SECONDS, (now - begun) / 20), _LONGEST_NAP_SECONDS))
            if now - looked > _LIVENESS_SECONDS:
                looked = now
                self._look_after(now - begun)
                if self.gone and not done():
                    raise RuntimeError(next(iter(self.gone.values())))

    def _look_after(self, waited: float) -> None:
        if self.watchdog is not None and self.watchdog.finding is not None:
            time.sleep(2.0)  # the other ranks come to the same finding
            raise RuntimeError("all ranks wait")
        for peer in self.peers:
            if not lives(self._processes[peer]):
                self.gone[peer] = f"the process of rank {peer} ({self._processes[peer]}) has ended"
            elif self.boards[peer][0, 0] == _CLOSED:
                self.gone[peer] = f"rank {peer} has left"
        if waited > self._timeout_seconds:
            raise RuntimeError(f"timed out after {self._timeout_seconds:.0f} s")

    def close(self) -> None:
        if self.board.size:
            self.board[0, 0] = _CLOSED
        super().close()
        self._quiet.set()
        with self.serving:
            self._in_flight.clear()
        self._last.clear()
        for mapped in self._mapped.values():
            ELSEWHERE.discard(mapped.untyped_storage().data_ptr())
        for board in self.boards:
            ELSEWHERE.discard(board.ctypes.data)
        self.boards.clear()
        self.board = numpy.empty((0, 0), dtype=numpy.int64)
        self._mapped.clear()
        self._place_of.clear()  # what others still use lives on with its tensors
        self._closer()


class ImaginedSharedMemory(PointToPoint):
    """What `SharedMemory` allocates, in a world whose other ranks do not exist."""

    needs_scratch = False
    reads_in_place = True

    def wire(self, buffer: torch.Tensor, scratch: torch.Tensor | None = None) -> Wire:
        others = buffer[: buffer.numel() - buffer.numel() // self.world_size]
        return super().wire(buffer, others)  # what is read there means nothing anyway


def _close_all(files: list[SharedFile], quiet: threading.Event, serving: threading.RLock) -> None:
    quiet.set()
    if serving.acquire(timeout=5.0):  # a thread must not be inside torch when the interpreter ends
        serving.release()
    for file in files:
        file.close()
    files.clear()
