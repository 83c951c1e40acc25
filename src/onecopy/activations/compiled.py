"""Compile a model block by block: like blocks share their graphs, and what could not be compiled is said in a sentence.

The graphs hold no hook and no collective, and they take weights as inputs, so a weight that lies in another slot at the
next call needs no new graph: the compiler guards on its class, type and shape, which are the same whenever it is in use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from onecopy.observe.log import log_once, warn

Forward = Callable[..., Any]


def graph_count() -> int:
    """Graphs that the compiler has made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def graph_breaks() -> dict[str, int]:
    """Why the compiler left its graphs so far in this process, and how often."""
    return dict(torch._dynamo.utils.counters["graph_break"])


class Compilation:
    """How blocks are compiled, and what came of it.

    Attributes:
        compile: from a function to its compiled form.
        failed: blocks that run as they are, with the compiler's reason.
    """

    def __init__(self, compile: Callable[[Forward], Forward]) -> None:
        self.compile = compile
        self.failed: dict[str, str] = {}

    @classmethod
    def with_(cls, backend: Any, options: dict[str, Any]) -> Compilation:
        """By `torch.compile(..., backend=backend, **options)`."""
        return cls(lambda forward: torch.compile(forward, backend=backend, **options))  # type: ignore[call-overload,no-any-return]

    def compiled(self, name: str, forward: Forward) -> Forward:
        """The block's forward, compiled at its first call; it runs as it is where it cannot be compiled."""
        fast = self.compile(forward)
        breaks_before: dict[str, int] = {}

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name in self.failed:
                return forward(*args, **kwargs)
            first = not seen
            if first:
                seen.append(True)
                breaks_before.update(graph_breaks())
            try:
                result = fast(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                self._give_up(name, error)
                return forward(*args, **kwargs)
            if first:
                self._say_breaks(name, breaks_before)
            return result

        seen: list[bool] = []
        return run

    def _give_up(self, name: str, error: Exception) -> None:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        self.failed[name] = reason
        warn(f"block '{name}' cannot be compiled and runs as it is: {reason}")

    @staticmethod
    def _say_breaks(name: str, before: dict[str, int]) -> None:
        new = [reason for reason, count in graph_breaks().items() if count > before.get(reason, 0)]
        if new:
            reason = next(line.strip() for line in new[0].splitlines() if line.strip())
            log_once(
                ("graph break", reason),
                f"block '{name}' is compiled in pieces, because the compiler had to leave it at {len(new)} place(s): {reason}",
            )
