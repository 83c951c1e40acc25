"""A chrome trace of one step, with the engine's phases as labels.

Open the file in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler

from onecopy.observe.log import current_rank, note, warn

_NULL: AbstractContextManager[None] = nullcontext()


def label(name: str) -> AbstractContextManager[Any]:
    """A `with` block that shows as `name` in a trace, ours or the user's own; free while no profiler runs."""
    if getattr(autograd_profiler, "_is_profiler_enabled", True):
        return torch.profiler.record_function(name)
    return _NULL


@contextmanager
def trace_step(path: str | Path, rank: int | None = None) -> Iterator[Path]:
    """Traces the `with` block, host and device, and writes it when the block ends, also by an exception.

    Yields the file that will be written: `path` on rank 0, with `.rank1` and so on before the ending on other ranks.
    Not collective.
    """
    target = path_for_rank(path, current_rank() if rank is None else rank)
    profiler = _start()
    try:
        yield target
    finally:
        _finish(profiler, target)


class StepTracer:
    """Traces the optimizer step of a given number; for a loop in which a step is several calls.

    `begin(step)` before a step's first forward and `end(step)` after its update; other steps cost one comparison. Steps
    count from 1. `step` None traces nothing.
    """

    def __init__(self, step: int | None, path: str | Path = "onecopy_trace.json", rank: int | None = None) -> None:
        self.step = step
        self.path = path_for_rank(path, current_rank() if rank is None else rank)
        self._profiler: Any = None

    def begin(self, step: int) -> None:
        """Starts the trace when `step` is the one to trace; may be called again for each micro-batch."""
        if step != self.step or self._profiler is not None:
            return
        if getattr(autograd_profiler, "_is_profiler_enabled", False):
            self.step = None
            warn(f"Step {step} is not traced into {self.path}: another profiler is running, and torch allows one.")
            return
        self._profiler = _start()

    def end(self, step: int) -> None:
        """Writes the trace when `step` was the one traced."""
        if self._profiler is not None and step == self.step:
            self.step = None
            self.close()

    def close(self) -> None:
        """Writes what there is of a trace that was begun; harmless otherwise."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            _finish(profiler, self.path)


def path_for_rank(path: str | Path, rank: int) -> Path:
    """`trace.json` for rank 0, `trace.rank1.json` for rank 1; an ending `.json` is added where there is none."""
    base = Path(path).expanduser()
    if not base.suffix:
        base = base.with_suffix(".json")
    return base if rank == 0 else base.with_suffix(f".rank{rank}{base.suffix}")


def _start() -> Any:
    profiler = torch.profiler.profile()  # all activities that this build of torch supports
    profiler.start()
    return profiler


def _finish(profiler: Any, target: Path) -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # kernels of the step that are still under way belong to it
    profiler.stop()
    target.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(target))
    note(f"Trace of one step written to {target}; open it in https://ui.perfetto.dev.")
