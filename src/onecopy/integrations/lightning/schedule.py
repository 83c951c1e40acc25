"""A learning-rate scheduler that does not step when the engine skipped the step for an fp16 overflow."""

from __future__ import annotations

from typing import Any

from onecopy.engine import Engine


class _UnlessSkipped:
    """Stands before a scheduler: everything but `step` is the scheduler's own."""

    def __init__(self, scheduler: Any, engine: Engine) -> None:
        self._scheduler = scheduler
        self._engine = engine

    def step(self, *arguments: Any, **keywords: Any) -> None:
        if self._engine.was_step_applied():
            self._scheduler.step(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def unless_skipped(scheduler: Any, engine: Engine) -> Any:
    """`scheduler`, whose `step()` does nothing after a step that the engine skipped."""
    return _UnlessSkipped(scheduler, engine)
