"""Says once that a wait for other ranks has become long: what is awaited, and which ranks have not come to it.

One thread a process looks at what its communicators wait for, once a second; waits themselves do nothing for it. A rank
that has waited for a while writes so into the group's store, and before it warns it reads what the others wrote: those
that wait too are not to blame, and the lowest of them speaks for all. On accelerators the host does not wait for a
collective, so only what it does wait for is seen: meetings, agreements, construction. Nothing is broken up here: the others may
be slow. `watchdog.py` ends waits that can be proven to last for ever.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from onecopy.observe.log import logger

VARIABLE = "ONECOPY_WARN_AFTER_SECONDS"
USUAL_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 1.0
_MANY = 8  # ranks that are named one by one
_TELL_AT = 0.3  # of the patience: from then on the others may read what a rank waits for


class Waiter(Protocol):
    """What waits: `waiting` is what for and since when (monotonic), `waits` counts."""

    rank: int
    world_size: int
    waits: int
    waiting: tuple[str, float] | None
    patience: float
    group: Any


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout the user gave a group: a sub-group would silently fall back to the library's default."""
    try:
        return group._get_backend(device).options._timeout  # type: ignore[no-any-return]
    except (RuntimeError, AttributeError):
        return None


def patience(timeout: timedelta | None) -> float:
    """Seconds after which a wait is long: what the environment says, and always well before the group's timeout."""
    try:
        asked = float(os.environ.get(VARIABLE, USUAL_SECONDS))
    except ValueError:
        asked = USUAL_SECONDS
    return asked if timeout is None else min(asked, timeout.total_seconds() / 3)


class _Joining:
    """A rank that waits for the others before it has a communicator."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, what: str) -> None:
        self.rank, self.world_size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self.patience = patience(timeout_of(group, device))
        self.waits = 1
        self.waiting: tuple[str, float] | None = (what, time.monotonic())


@contextmanager
def joining(group: dist.ProcessGroup, device: torch.device, what: str) -> Iterator[None]:
    """Inside, this rank waits for the other ranks of `group` to make the same call."""
    waiter = _Joining(group, device, what)
    real = waiter.world_size > 1 and "fake" not in str(dist.get_backend_config(group))
    if real:
        look_after(waiter)
    try:
        yield
    finally:
        if real:
            look_no_longer(waiter)


class _Watch:
    """The thread; it ends when there is nobody left to watch, and begins again with the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._cases: weakref.WeakKeyDictionary[Waiter, _Case] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def add(self, waiter: Waiter) -> None:
        with self._lock:
            self._cases[waiter] = _Case()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="onecopy long waits", daemon=True)
                self._thread.start()
        self._changed.set()

    def remove(self, waiter: Waiter) -> None:
        with self._lock:
            self._cases.pop(waiter, None)
        self._changed.set()

    def _run(self) -> None:
        while (pause := self._look()) is not None:
            self._changed.wait(pause)
            self._changed.clear()

    def _look(self) -> float | None:
        """Look at every waiter once; seconds until the next look, None when there is nobody any more."""
        with self._lock:
            cases = list(self._cases.items())
            if not cases:
                self._thread = None
                return None
        for waiter, case in cases:
            case.look(waiter)
        return min(_LOOK_EVERY_SECONDS, *(waiter.patience / 8 for waiter, _ in cases))


class _Case:
    """What has been told and said of one waiter's waits."""

    def __init__(self) -> None:
        self._told = 0  # the wait that the others can read of
        self._said = 0  # the wait that has been warned of
        self._store: Any = None

    def look(self, waiter: Waiter) -> None:
        waiting, number = waiter.waiting, waiter.waits
        waited = time.monotonic() - waiting[1] if waiting is not None else 0.0
        try:
            if self._told and (waiting is None or self._told != number):
                self._withdraw(waiter)
            if waiting is None or self._said == number or waited < _TELL_AT * waiter.patience:
                return
            if self._told != number:
                self._tell(waiter, waiting[0])
                self._told = number
            elif waited >= waiter.patience:
                self._said = number
                self._say(waiter, waiting[0], waited)
        except (RuntimeError, AttributeError, ValueError):
            self._said = number  # the store is gone, or the communicator has been closed: the wait's own error says so

    def _tell(self, waiter: Waiter, what: str) -> None:
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = shared.clone()  # the main thread may be blocked in the other one
        self._store.set(_key(waiter, waiter.rank), json.dumps(what))

    def _withdraw(self, waiter: Waiter) -> None:
        self._told = 0
        store, self._store = self._store, None
        store.delete_key(_key(waiter, waiter.rank))

    def _say(self, waiter: Waiter, what: str, waited: float) -> None:
        keys = [_key(waiter, rank) for rank in range(waiter.world_size)]
        known = [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        together = [rank for rank, other in enumerate(known) if other == what]
        elsewhere = [rank for rank, other in enumerate(known) if other not in (what, None)]
        absent = [rank for rank, other in enumerate(known) if other is None]
        if min(together + elsewhere) != waiter.rank:
            return
        others = [f"rank {rank} waits for the {known[rank]}" for rank in elsewhere[:_MANY]]
        others += [f"{_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not come to it"] if absent else []
        logger.warning(
            "%s of %d %s waited for the %s for %.0f s%s. That is no error if slow work goes on there (loading, saving, an evaluation); "
            "otherwise those ranks made another call or ended: every rank must make the same calls in the same order",
            _ranks(together), waiter.world_size, "has" if len(together) == 1 else "have", what, waited,
            f"; {', '.join(others)}" if others else "",
        )  # fmt: skip


def _key(waiter: Waiter, rank: int) -> str:
    return f"onecopy/long waits/{waiter.group.group_name}/{rank}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MANY]))
    return f"ranks {named}" + (f" and {len(ranks) - _MANY} more" if len(ranks) > _MANY else "")


_watch = _Watch()


def look_after(waiter: Waiter) -> None:
    """Watch a waiter of several real ranks for as long as it lives. Not collective."""
    _watch.add(waiter)


def look_no_longer(waiter: Waiter) -> None:
    """Stop watching. Not collective."""
    _watch.remove(waiter)
