"""How long checkpointed functions take, forward and again in backward, and what their inputs take up: one line a pass."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onecopy.activations.storage import Held
from onecopy.observe.log import note
from onecopy.observe.progress import format_bytes


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class Profile:
    """Counts calls and seconds; the line of a pass is said when the next pass begins."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self._seconds = [0.0, 0.0]
        self._calls = [0, 0]

    @contextmanager
    def call(self, again: bool) -> Iterator[None]:
        """Around one call of a checkpointed function: its forward, or the one `again` in backward."""
        if not again and self._calls[1]:
            self.say()
        synchronize()
        began = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self._seconds[again] += time.perf_counter() - began
            self._calls[again] += 1

    def say(self) -> None:
        """Say the line of the pass so far, on rank 0, and begin a new one."""
        forward, backward = (f"{1e3 * seconds:.1f} ms" for seconds in self._seconds)
        note(
            f"activation checkpointing: {self._calls[0]} calls {forward}, {self._calls[1]} again in backward {backward}, "
            f"inputs stored at most {format_bytes(self.held.peak)}"
        )
        self._seconds, self._calls, self.held.peak = [0.0, 0.0], [0, 0], self.held.now
