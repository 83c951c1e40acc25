"""What a person sees of a run: a live bar in a terminal, plain lines elsewhere, a summary at the end; rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

LINES_IN_ALL = 20  # plain progress lines of a run whose output is not a terminal


def bytes_text(count: float) -> str:
    """A number of bytes with a unit: 1,536,000 is "1.5 MB" (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a run at a step. `memory` is bytes by category, `sent` bytes in the last step, both of one rank."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    memory: Mapping[str, int]
    sent: int
    collectives: int

    def numbers(self) -> str:
        """Loss, learning rate and speed in one line."""
        return f"loss {self.loss:.4f}  lr {self.learning_rate:.2e}  {self.tokens_per_second:,.0f} tokens/s"

    def costs(self) -> str:
        """Memory by category and bytes sent in one line."""
        parts = [f"{name.replace('_', ' ')} {bytes_text(size)}" for name, size in self.memory.items() if size]
        memory = " · ".join(parts) or "not known"
        return f"memory a rank: {memory}\nsent a rank and step: {bytes_text(self.sent)} in {self.collectives} messages"


class Display:
    """The live view of a run; a context manager. `quiet` shows nothing, as on ranks other than 0."""

    def __init__(self, steps: int, first_step: int, quiet: bool, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self.live_wanted = self.console.is_terminal and not quiet
        self._every = max(1, (steps - first_step) // LINES_IN_ALL)
        self._next_line = first_step + self._every
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first_step, numbers="")
        self._costs = Text("", style="dim")
        self._live = Live(Group(self._bar, self._costs), console=self.console, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self.live_wanted:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live_wanted:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def show(self, reading: Reading) -> None:
        """Bring the bar up to a step; without a terminal, print some of the steps as lines."""
        self._bar.update(self._task, completed=reading.step, numbers=reading.numbers())
        self._costs.plain = reading.costs()
        if not self.live_wanted and reading.step >= self._next_line:
            self.say(f"step {reading.step:>5}  {reading.numbers()}")
            self._next_line += self._every


def summary(reading: Reading, first_loss: float, validation_loss: float, steps: int, seconds: float) -> Table:
    """The table a run ends with."""
    table = Table(title="one rank's memory and traffic", title_justify="left", show_header=False)
    for name, size in reading.memory.items():
        table.add_row(name.replace("_", " "), bytes_text(size))
    table.add_section()
    table.add_row("sent a step", f"{bytes_text(reading.sent)} in {reading.collectives} messages")
    table.add_section()
    table.add_row("training loss", f"{first_loss:.4f} at the start, {reading.loss:.4f} at the end")
    table.add_row("validation loss", f"{validation_loss:.4f}")
    table.add_row("time", f"{seconds:.0f} s for {steps} steps")
    return table


def sample_panel(text: str) -> Panel:
    """Generated text in a frame."""
    return Panel(Text(text), title="generated text", title_align="left")


class Clock:
    """Tokens a second since the last reading."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """Add tokens that were trained on."""
        self._tokens += tokens

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent on something else, such as an evaluation."""
        self._start += seconds

    def read(self) -> float:
        """Tokens a second; starts the next interval."""
        now = time.perf_counter()
        speed = self._tokens / max(1e-9, now - self._start)
        self._start, self._tokens = now, 0
        return speed


def reading_of(engine: Any, step: int, loss: float, speed: float) -> Reading:
    """A reading from an engine's public counters."""
    traffic = engine.communication()
    return Reading(
        step, loss, engine.get_lr()[0], speed, engine.memory(), traffic["bytes_sent"], traffic["collectives"]
    )
