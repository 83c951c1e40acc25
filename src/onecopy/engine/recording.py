"""A run's own record, for `onecopy report` and `onecopy tune`: a line a step, and one step storage by storage.

`{"onecopy": {"record": FOLDER}}` makes rank 0 write `FOLDER/run_record.jsonl`: first what runs ("run"), then every optimizer
step ("step"), and once the whole memory and lanes of one step ("detail"), seen by the same ledger as a plan's.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onecopy.engine.whereabouts import Whereabouts, adopt_state, adopt_state_before_steps, block_of
from onecopy.observe.ledger import CATEGORIES, Ledger
from onecopy.observe.log import warn

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

FILE = "run_record.jsonl"


class RunRecord:
    """Writes the record; every method returns at once where nothing is recorded (no folder, or another rank than 0)."""

    def __init__(self, folder: str | None, detail_step: int, rank: int) -> None:
        self.path = Path(folder).expanduser() / FILE if folder and rank == 0 else None
        self.detail_step = detail_step
        self._detail: StepDetail | None = None
        self._last = 0.0

    def begins(self, engine: Engine) -> None:
        """The engine stands: write what runs, once the first forward has shown its inputs."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")

        def first_forward(_: Any, args: Any, kwargs: Any) -> None:
            handle.remove()
            self._write({"kind": "run", **_what_runs(engine), "inputs": _shapes((args, kwargs))})

        handle = engine.module.register_forward_pre_hook(first_forward, with_kwargs=True)
        self._last = time.perf_counter()
        if self.detail_step == 1:
            self._detail = StepDetail(engine)

    def step_done(self, engine: Engine) -> None:
        """A boundary has passed: write its line. On an accelerator this waits for the step's end, so that its time is true."""
        if self.path is None:
            return
        line: dict[str, Any] = {"kind": "step", "step": engine.global_steps}
        if engine.device.type != "cpu":
            torch.accelerator.synchronize(engine.device)
            line["allocated_peak_bytes"] = torch.accelerator.max_memory_allocated(engine.device)
            line["reserved_peak_bytes"] = torch.accelerator.max_memory_reserved(engine.device)
        now = time.perf_counter()
        line |= {
            "seconds": now - self._last,
            "samples": engine.train_batch_size(),
            "detailed": self._detail is not None,
        }
        line |= {"memory_bytes": engine.memory(), "sent": engine.communication()}
        self._write(line)
        if self._detail is not None:
            self._write({"kind": "detail", "step": engine.global_steps, **self._detail.finish(engine)})
            self._detail = None
        elif engine.global_steps == self.detail_step - 1:
            self._detail = StepDetail(engine)
        self._last = time.perf_counter()

    def close(self) -> None:
        if self._detail is not None:
            self._detail.stop()
            self._detail = None

    def _write(self, line: dict[str, Any]) -> None:
        assert self.path is not None
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk stops the record, not the training
            warn(f"The run's record {self.path} ends here: {error}.")
            self.path = None


class StepDetail:
    """One step under a ledger: births and deaths of storages, and what each lane did when, on the host's clock."""

    def __init__(self, engine: Engine) -> None:
        self.ledger = Ledger()
        adopt_state(engine, self.ledger)
        self.whereabouts = Whereabouts(engine.module, self.ledger)
        self.whereabouts.begin("step")
        self.start = len(self.ledger.events)
        self.ledger.reset_peak()
        self.lanes = Lanes(self.ledger)
        self.ledger.operators = self.lanes.operator
        self._engine, self._timers, self._communicator = engine, engine.timers, engine.communicator
        engine.timers = _Watched(engine.timers, self._phase)  # type: ignore[assignment]
        for lane in ("gather", "reduce"):
            setattr(
                engine.communicator,
                f"start_{lane}",
                self.lanes.watching(lane, getattr(engine.communicator, f"start_{lane}")),
            )
        self._adopting = adopt_state_before_steps(engine, self.ledger)
        self._inputs = engine.module.register_forward_pre_hook(self._adopt_inputs, with_kwargs=True)
        self.ledger.__enter__()
        self._running = True

    def _adopt_inputs(self, _: Any, args: Any, kwargs: Any) -> None:
        found: list[torch.Tensor] = [
            t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        ]
        self.ledger.adopt(found, "batch")

    def _phase(self, name: str) -> None:
        self.ledger.mark(name)
        self.whereabouts.begin(name)
        if name == "backward":
            self.ledger.stretch = "after"
        elif name == "step":
            adopt_state(self._engine, self.ledger)

    def stop(self) -> None:
        """Take everything off again."""
        if not self._running:
            return
        self._running = False
        self.ledger.__exit__(None, None, None)
        self._inputs.remove()
        self._adopting.remove()
        self.whereabouts.close()
        self._engine.timers = self._timers
        del self._communicator.start_gather, self._communicator.start_reduce

    def finish(self, engine: Engine) -> dict[str, Any]:
        """The step is over: what it showed. Sizes in bytes, times in seconds from the step's start."""
        adopt_state(engine, self.ledger)
        self.stop()
        ledger = self.ledger
        ledger.stop()
        ledger.label()
        stop = len(ledger.events)
        return {
            "categories": list(CATEGORIES),
            "peak_bytes_by_category": ledger.by_category(ledger.peak_at),
            "resting_bytes_by_category": ledger.by_category(stop),
            "timeline": ledger.timeline(self.start, stop),
            "marks": [mark for mark in ledger.marks if mark[0] >= self.start],
            "holders": [{"module": m, "category": c, "bytes": b} for m, c, b in ledger.holders(ledger.peak_at)],
            "bars": self.lanes.finish(),
        }


class Lanes:
    """(lane, start, end, label) of compute by block and phase, and of every transfer from its start to the end of its wait."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.bars: list[tuple[str, float, float, str]] = []
        self._zero = time.perf_counter()
        self._label, self._since, self._seen = "", 0.0, 0.0

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has returned: it lengthens the bar of its place, or begins another."""
        label = f"{self.ledger.phase} {block_of(self.ledger.module) or self.ledger.module}".strip()
        now = time.perf_counter() - self._zero
        if label != self._label:
            self._close()
            self._label, self._since = label, self._seen
        self._seen = now

    def _close(self) -> None:
        if self._label and self._seen > self._since:
            self.bars.append(("compute", self._since, self._seen, self._label))

    def watching(self, lane: str, start: Any) -> Any:
        """The communicator's method, with its transfers entered as bars."""

        def watched(*args: Any) -> Any:
            began = time.perf_counter() - self._zero
            return _Pending(
                start(*args), lambda: self.bars.append((lane, began, time.perf_counter() - self._zero, str(args[-1])))
            )

        return watched

    def finish(self) -> list[tuple[str, float, float, str]]:
        self._close()
        self._label = ""
        return sorted(self.bars, key=lambda bar: bar[1])


class _Pending:
    """A transfer under way that says once when its wait has ended."""

    def __init__(self, pending: Any, ended: Any) -> None:
        self.pending, self.ended = pending, ended

    def _end(self) -> None:
        ended, self.ended = self.ended, None
        if ended is not None:
            ended()

    def wait(self) -> None:
        self.pending.wait()
        self._end()

    def drain(self) -> None:
        self.pending.drain()
        self._end()

    def finish(self, out: torch.Tensor, accumulate: bool) -> None:
        self.pending.finish(out, accumulate)
        self._end()


class _Watched:
    """The engine's timers, with a word at the beginning of each phase."""

    def __init__(self, timers: Any, begins: Any) -> None:
        self._timers, self._begins = timers, begins

    def phase(self, name: str) -> AbstractContextManager[Any]:
        self._begins(name)
        return self._timers.phase(name)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timers, name)


def _what_runs(engine: Engine) -> dict[str, Any]:
    from onecopy import __version__

    device = (
        "CPU" if engine.device.type == "cpu" else torch.get_device_module(engine.device).get_device_name(engine.device)
    )
    places = [place for unit in engine.units for flat in unit.buffers for place in flat.layout.ranges]
    return {
        "version": 1, "onecopy": __version__, "torch": torch.__version__, "device": device, "ranks": engine.communicator.world_size,
        "model": type(engine.module).__name__, "parameters": sum(prod(place.shape) for place in places),
        "stage": engine.configuration.zero.stage, "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(), "config": json.loads(json.dumps(engine.config, default=str)),
    }  # fmt: skip


def _shapes(value: Any) -> list[list[int]]:
    return [list(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
