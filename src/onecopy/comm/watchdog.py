"""Finds out that all ranks wait for each other, and ends it with an error that names every rank's wait.

A gather or reduce that some rank never joins would hang until the process group's timeout, half an hour by default, and
then blame the wrong call. So a rank that has waited for a while writes what it waits for into the group's store and
reads what the others wrote. When every rank waits, and none has got any further between two looks, nobody ever will:
the wait is broken up and each rank raises. A rank that is merely slow is not waiting, so it is never blamed.
"""

import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from onecopy.comm.communicator import Communicator

PATIENCE_SECONDS = 10.0  # a wait shorter than this is not looked into
_LOOK_EVERY_SECONDS = 1.0
_LOOKS = 3  # all ranks must stand still for so many looks in a row
_BREAKING_TAG = 1 << 30


class Watchdog:
    """A thread that looks after one communicator's waits.

    Attributes:
        finding: what every rank waits for, once a deadlock is proven.
    """

    def __init__(self, communicator: "Communicator", patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.finding: str | None = None
        self._communicator = communicator
        self._patience = patience_seconds
        self._prefix = f"onecopy/watchdog/{communicator.group.group_name}"
        self._store = _store()
        self._stopped = threading.Event()
        self._still = 0
        self._last_seen: list[Any] | None = None
        self._thread = threading.Thread(target=self._watch, name="onecopy watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(_LOOK_EVERY_SECONDS, self._patience / 2)):
            try:
                self._communicator.serve_idle()
            except RuntimeError:
                pass  # this rank's own wait will meet it and say so
            waiting = self._communicator.waiting
            if waiting is None or time.monotonic() - waiting[1] < self._patience:
                self._still = 0
                continue
            try:
                self._look(waiting)
            except RuntimeError:  # the store is gone: the job is being torn down
                return
            if self.finding is not None:
                self._break_up()
                return

    def _look(self, waiting: tuple[str, float]) -> None:
        """Say what this rank waits for, and see whether all ranks have stood still since the last look."""
        rank, world_size = self._communicator.rank, self._communicator.world_size
        self._store.set(f"{self._prefix}/{rank}", json.dumps([self._communicator.waits, waiting[0], time.time()]))
        keys = [f"{self._prefix}/{other}" for other in range(world_size)]
        if not all(self._store.check([key]) for key in keys):
            return
        entries = [json.loads(self._store.get(key)) for key in keys]
        if any(time.time() - written > self._patience + 5 * _LOOK_EVERY_SECONDS for _, _, written in entries):
            return  # that rank has gone on since
        seen = [(count, what) for count, what, _ in entries]
        self._still = self._still + 1 if seen == self._last_seen else 0
        self._last_seen = seen
        if self._still >= _LOOKS:
            self.finding = "; ".join(f"rank {place} waits for the {what}" for place, (_, what) in enumerate(seen))

    def _break_up(self) -> None:
        """Make the blocked wait fail: gloo closes its connections when any receive on them times out."""
        communicator = self._communicator
        time.sleep(2 * _LOOK_EVERY_SECONDS)  # let the other ranks come to the same finding first
        peer = (communicator.rank + 1) % communicator.world_size
        try:
            work = dist.irecv(torch.empty(1), group=communicator.group, group_src=peer, tag=_BREAKING_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except (RuntimeError, AttributeError):
            pass  # as intended; or the communicator has been closed meanwhile and has no group any more


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def watchdog_for(communicator: "Communicator", timeout_seconds: float | None) -> Watchdog | None:
    """A watchdog where ranks can block each other and gloo can be broken up: more than one real rank on the CPU.

    NCCL has a watchdog of its own.
    """
    if communicator.world_size == 1 or communicator.imagined or communicator.device.type != "cpu":
        return None
    patience = PATIENCE_SECONDS if timeout_seconds is None else min(PATIENCE_SECONDS, timeout_seconds / 4)
    return Watchdog(communicator, patience)
