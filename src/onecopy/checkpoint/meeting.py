"""Ranks meet in the process group's store: no collective is needed, so a rank that stays away is named, not waited for.

A save runs beside training when it is asynchronous, and a forgotten rank must not hang the others; so nothing here
touches the process group itself. Ranks that are at work give signs of life, and only silence counts against the time limit.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from onecopy.comm import Communicator
from onecopy.errors import CheckpointError

_POLL_SECONDS = 0.005
_BEAT_SECONDS = 1.0


class StoreLost(CheckpointError):
    """The process in which the ranks' store lives, rank 0's as a rule, has ended."""


class Meeting:
    """One collective call (a save, say) of the ranks of a communicator.

    Args:
        what: what is called, for keys and messages: "save_checkpoint".
        number: how many of its kind went before, the same on all ranks.
        timeout: seconds of silence after which a rank counts as missing.
    """

    def __init__(self, communicator: Communicator, what: str, number: int, timeout: float) -> None:
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.what = what
        self.timeout = timeout
        self._alone = communicator.world_size == 1 or communicator.imagined
        self._prefix = f"onecopy/{getattr(communicator.group, 'group_name', '')}/{what}/{number}"
        self._store: Any = None if self._alone else dist.distributed_c10d._get_default_store()
        self._beaten = 0.0
        self._worked = 0.0  # when this rank, or one it waits for, was last seen at work
        self._own: dict[str, str] = {}
        self._set: list[str] = []

    def in_thread(self) -> None:
        """From now on this is used by another thread: it gets a connection of its own, so that waits block nobody."""
        if self._store is not None:
            self._store = self._store.clone()

    def arrive(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order.

        Raises CheckpointError naming the ranks that did not call within the timeout.
        """
        self.publish("arrival", value)
        present, missing = self._gather("arrival")
        if missing:
            self.leave()
            here = sorted(present)
            raise CheckpointError(
                f"{self.what} was called by rank{'s' if len(here) > 1 else ''} {_listed(here)} and not by {_listed(missing)} within "
                f"{self.timeout:g} seconds; every rank must call it, as each holds a part of the training state (take the call out "
                f"of any `if rank == 0:`)"
            )
        return [present[rank] for rank in range(self.world_size)]

    def exchange(self, step: str, value: Any) -> list[Any]:
        """Every rank's value after some work; raises CheckpointError naming ranks that fell silent at it."""
        self.publish(step, value)
        return self.collect(step)

    def collect(self, step: str) -> list[Any]:
        """The values that all ranks published (or will) for this step."""
        present, missing = self._gather(step)
        if missing:
            raise CheckpointError(
                f"{self.what}: no sign of life from rank {_listed(missing)} for {self.timeout:g} seconds ({step}); "
                "look at its output for the cause"
            )
        return [present[rank] for rank in range(self.world_size)]

    def publish(self, step: str, value: Any) -> None:
        if self._alone:
            self._own[step] = json.dumps(value)
            return
        self._write(f"{step}/{self.rank}", value)

    def of_rank(self, step: str, rank: int) -> Any:
        """What one rank published for this step, waiting for it."""
        if self._alone:
            return json.loads(self._own[step])
        present, missing = self._gather(step, [rank])
        if missing:
            raise CheckpointError(
                f"{self.what}: no sign of life from rank {rank} for {self.timeout:g} seconds ({step})"
            )
        return present[rank]

    def beat(self) -> None:
        """A sign of life of a rank at work; cheap enough to give often."""
        self._worked = max(self._worked, time.time())
        self._pass_on()

    def _pass_on(self) -> None:
        """A rank that waits passes on the latest sign of work it has heard of, so that waiting alone keeps nobody waiting."""
        now = time.monotonic()
        if not self._alone and now - self._beaten > _BEAT_SECONDS:
            self._beaten = now
            self._write(f"beat/{self.rank}", self._worked)

    def part(self) -> None:
        """The end of the call: rank 0, in whose process the store may live, stays until the others have read all they need.

        A program that ends right after its last save or load would otherwise take the store from under the others' feet.
        """
        if self._alone:
            return
        try:
            if self.rank:
                self.publish("parted", None)
            else:
                self._gather("parted", list(range(1, self.world_size)))  # one that does not come has its own error
        except StoreLost:
            pass  # nothing is needed from it any more

    def leave(self) -> None:
        """Take back what this rank published."""
        if self._store is not None:
            try:
                for key in self._set:
                    self._ask(self._store.delete_key, key)
            except StoreLost:
                pass  # and all keys with it
        self._set = []

    # ------------------------------------------------------------------------------------------------------- internals
    def _write(self, name: str, value: Any) -> None:
        key = f"{self._prefix}/{name}"
        self._ask(self._store.set, key, zlib.compress(json.dumps(value).encode(), 1))
        if key not in self._set:
            self._set.append(key)

    def _read(self, name: str) -> Any:
        return json.loads(zlib.decompress(self._ask(self._store.get, f"{self._prefix}/{name}")))

    def _has(self, name: str) -> bool:
        return bool(self._ask(self._store.check, [f"{self._prefix}/{name}"]))

    def _ask(self, question: Callable[..., Any], *values: Any) -> Any:
        try:
            return question(*values)
        except RuntimeError as error:
            raise StoreLost(
                f"{self.what}: the connection to the process that holds the ranks' store, rank 0 as a rule, was lost "
                f"({str(error).splitlines()[0]}); look at its output for the cause"
            ) from error

    def _gather(self, step: str, ranks: list[int] | None = None) -> tuple[dict[int, Any], list[int]]:
        """Values by rank, and the ranks that stayed silent."""
        if self._alone:
            value = json.loads(self._own[step])
            return {rank: value for rank in range(self.world_size)}, []
        missing = list(range(self.world_size)) if ranks is None else list(ranks)
        present: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        looked = time.monotonic()
        while True:
            for rank in [rank for rank in missing if self._has(f"{step}/{rank}")]:
                present[rank] = self._read(f"{step}/{rank}")
                missing.remove(rank)
            now = time.monotonic()
            if not missing or now > deadline:
                return present, missing
            if now - looked > _BEAT_SECONDS and step != "arrival":
                looked = now
                latest = max([self._read(f"beat/{rank}") for rank in missing if self._has(f"beat/{rank}")], default=0.0)
                if latest > self._worked:
                    self._worked, deadline = latest, now + self.timeout
                self._pass_on()
            time.sleep(_POLL_SECONDS)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:10])) + (", ..." if len(ranks) > 10 else "")
