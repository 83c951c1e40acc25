"""Where the time of a step goes: forward, gather wait, backward, reduce wait, step; free when nobody asked.

On the host a phase is two readings of the clock. On an accelerator it is two events in the current stream; they are
read when a table is asked for, so timing never makes the host wait.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PHASES = ("forward", "gather wait", "backward", "reduce wait", "step")

_NULL: AbstractContextManager[None] = nullcontext()


class NoTimers:
    """The timers of a run that does not time: every call does nothing."""

    enabled = False

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return _NULL

    def start(self, name: str) -> None:
        pass

    def stop(self, name: str) -> None:
        pass

    def step_done(self) -> None:
        pass

    def milliseconds(self) -> dict[str, float]:
        return {}

    def table(self) -> str:
        return ""

    def reset(self) -> None:
        pass


NO_TIMERS = NoTimers()


class Timers:
    """Times nested phases; the time of an inner phase is taken out of the outer one, so phases add up to the step.

    One object is shared by the thread that calls backward and by autograd's own threads: while those run hooks the
    caller waits, so phases still nest. `step_done()` ends an optimizer step; numbers are means of the steps since the
    last `reset()`.
    """

    enabled = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._clock: _HostClock | _DeviceClock = _clock_for(self.device)
        self._open: list[_Span] = []
        self._closed: deque[_Span] = deque()
        self._phases = {name: _Phase(self, name) for name in PHASES}
        self._own: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._steps = 0
        self._began = time.perf_counter()

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Times a `with` block as `name`: one of `PHASES`, or another name, which gets a row of its own."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self, name)
        return phase

    def start(self, name: str) -> None:
        """Opens a phase that `stop` closes; for places where no `with` block fits."""
        self._open.append(_Span(name, self._open[-1] if self._open else None, self._clock.now()))

    def stop(self, name: str) -> None:
        """Closes the innermost open phase `name`; phases left open inside it (an exception passed) are forgotten."""
        for depth in range(len(self._open) - 1, -1, -1):
            if self._open[depth].name == name:
                span, *left_open = self._open[depth:]
                del self._open[depth:]
                for forgotten in left_open:
                    forgotten.counts = False
                span.end = self._clock.now()
                self._closed.append(span)
                return

    def step_done(self) -> None:
        """Counts one optimizer step, and adds up what the device has finished by now, without waiting for it."""
        self._steps += 1
        self._add_up(wait=False)

    def milliseconds(self) -> dict[str, float]:
        """Mean milliseconds a step for each phase, and "total" by the wall clock; waits for the device."""
        self._add_up(wait=True)
        steps = max(1, self._steps)
        names = [*PHASES, *(name for name in self._own if name not in PHASES)]
        means = {name: self._own.get(name, 0.0) / steps for name in names}
        means["total"] = (time.perf_counter() - self._began) * 1e3 / steps
        return means

    def table(self) -> str:
        """The phases as text: milliseconds a step, share of the wall time, calls a step; waits for the device."""
        means = self.milliseconds()
        total = means.pop("total")
        steps = max(1, self._steps)
        rows = [(name, mean, self._calls.get(name, 0) / steps) for name, mean in means.items()]
        rows.append(("other", max(0.0, total - sum(means.values())), 0.0))
        lines = [f"{'phase':<14}{'ms a step':>12}{'share':>9}{'calls':>8}"]
        for name, mean, calls in rows:
            share = mean / total if total > 0 else 0.0
            count = f"{calls:>8.4g}" if calls else ""
            lines.append(f"{name:<14}{mean:>12.2f}{share:>9.1%}{count}".rstrip())
        lines.append(f"{'total':<14}{total:>12.2f}{1:>9.1%}   (mean of {self._steps} steps)")
        return "\n".join(lines)

    def reset(self) -> None:
        """Forgets all closed phases and steps; waits for the device."""
        self._add_up(wait=True)
        self._own.clear()
        self._calls.clear()
        self._steps = 0
        self._began = time.perf_counter()

    def _add_up(self, wait: bool) -> None:
        while self._closed and (wait or self._clock.finished(self._closed[0].end)):
            span = self._closed.popleft()
            spent = self._clock.milliseconds(span.start, span.end)
            self._own[span.name] = self._own.get(span.name, 0.0) + spent - span.inner
            self._calls[span.name] = self._calls.get(span.name, 0) + 1
            outer = span.outer
            while outer is not None and not outer.counts:
                outer = outer.outer
            if outer is not None:
                outer.inner += spent  # the outer one closes later, so it is added up later
            self._clock.give_back(span.start, span.end)


def timers_for(enabled: bool, device: torch.device | str = "cpu") -> Timers | NoTimers:
    """Timers when `wall_clock_breakdown` asks for them, otherwise the ones that cost nothing."""
    return Timers(device) if enabled else NO_TIMERS


class _Span:
    __slots__ = ("counts", "end", "inner", "name", "outer", "start")

    def __init__(self, name: str, outer: _Span | None, start: Any) -> None:
        self.name = name
        self.outer = outer
        self.start = start
        self.end: Any = None
        self.counts = True  # False when it was left open
        self.inner = 0.0  # milliseconds spent in phases inside this one


class _Phase(AbstractContextManager[None]):
    """A reusable `with` block; the open spans live in the timers, so it may be entered again while open."""

    __slots__ = ("_name", "_timers")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers = timers
        self._name = name

    def __enter__(self) -> None:
        self._timers.start(self._name)

    def __exit__(self, *exception: object) -> None:
        self._timers.stop(self._name)


class _HostClock:
    """Nanoseconds of this process's clock."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def finished(self, reading: int) -> bool:
        return True

    def milliseconds(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def give_back(self, *readings: int) -> None:
        pass


class _DeviceClock:
    """Events in the device's current stream, used again once they have been read."""

    def __init__(self, event_class: Any) -> None:
        self._event_class = event_class
        self._free: list[Any] = []

    def now(self) -> Any:
        event = self._free.pop() if self._free else self._event_class(enable_timing=True)
        event.record()
        return event

    def finished(self, reading: Any) -> bool:
        return bool(reading.query())

    def milliseconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))

    def give_back(self, *readings: Any) -> None:
        self._free.extend(readings)


def _clock_for(device: torch.device) -> _HostClock | _DeviceClock:
    if device.type == "cpu":
        return _HostClock()
    try:
        return _DeviceClock(torch.get_device_module(device).Event)
    except (RuntimeError, AttributeError):  # a device without timing events
        return _HostClock()
