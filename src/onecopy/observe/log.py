"""The package's logger "onecopy": what one rank says once, and how often a repeated warning may be heard.

Healthy training prints a handful of lines on rank 0 and none on the others, so that the line that matters is seen.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

logger = logging.getLogger("onecopy")

_said: set[Hashable] = set()


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr while the program has not set up logging of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[onecopy] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # looked up now: notebooks and test runners replace it
            super().emit(record)


if not logger.handlers:
    logger.addHandler(_FallbackHandler())
    logger.setLevel(logging.INFO)


def current_rank() -> int:
    """This process's rank: of the default group, else of the launcher's environment, else 0. Not collective."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0


def rank_zero() -> bool:
    """True on the one rank that speaks for all."""
    return current_rank() == 0


def note(message: str, *, every_rank: bool = False) -> None:
    """Says something worth knowing, on rank 0 only unless `every_rank`."""
    _say(logging.INFO, message, every_rank)


def warn(message: str, *, every_rank: bool = False) -> None:
    """Says that something is probably not as its author means, on rank 0 only unless `every_rank`."""
    _say(logging.WARNING, message, every_rank)


def log_once(key: Hashable, message: str, *, level: int = logging.WARNING, every_rank: bool = False) -> bool:
    """Says `message` the first time that `key` comes in this process; whether it was the first time.

    The key is remembered on every rank, the message is heard on rank 0 only unless `every_rank`. Put an engine's
    identity into the key where a second engine should speak again.
    """
    if key in _said:
        return False
    _said.add(key)
    _say(level, message, every_rank)
    return True


def keep_quiet(key: Hashable) -> None:
    """Counts `key` as said: for a caller who knows that the message would mislead."""
    _said.add(key)


@contextmanager
def each_text_once() -> Iterator[None]:
    """Inside, a line is heard once in this process: for who runs the same engine again and again."""

    def new(record: logging.LogRecord) -> bool:
        key = ("text", record.getMessage())
        heard = key in _said
        _said.add(key)
        return not heard

    logger.addFilter(new)
    try:
        yield
    finally:
        logger.removeFilter(new)


def forget_said() -> None:
    """Lets every `log_once` speak again; for tests."""
    _said.clear()


def _say(level: int, message: str, every_rank: bool) -> None:
    if every_rank and not rank_zero():
        logger.log(level, "rank %d: %s", current_rank(), message)
    elif every_rank or rank_zero():
        logger.log(level, "%s", message)


class SkippedSteps:
    """Warns of steps skipped for non-finite gradients: the first at once, then at most once in `every` steps."""

    def __init__(self, every: int = 100) -> None:
        self.every = every
        self.total = 0
        self._unsaid = 0
        self._last_said: int | None = None

    def skipped(self, step: int, detail: str = "") -> bool:
        """Counts the skip of optimizer step `step` (from 1); whether a warning was due. Call it on every rank."""
        self.total += 1
        self._unsaid += 1
        if self._last_said is not None and 0 <= step - self._last_said < self.every:
            return False
        counted = f" ({self._unsaid} skipped since the last warning, {self.total} in all)" if self.total > 1 else ""
        more = f" {detail.strip()}" if detail else ""
        warn(f"Step {step} was skipped on all ranks: gradients were not finite, nothing was updated{counted}.{more}")
        self._unsaid = 0
        self._last_said = step
        return True
