"""The line of `steps_per_print` (loss, rate, throughput, skips) and the one of memory by category."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "k", "M", "G", "T")


class Progress:
    """Counts samples and tokens between two lines, and writes the line.

    The first line's time starts at construction or at `restart()` (call it after a first, slow step).
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Starts counting from now."""
        self._began = time.perf_counter()
        self._steps = 0
        self._samples = 0
        self._tokens = 0

    def step_done(self, samples: int, tokens: int = 0) -> None:
        """Adds one optimizer step with its samples, and tokens where known, of all ranks together."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def line(
        self,
        step: int,
        *,
        rates: Sequence[float] = (),
        loss: float | None = None,
        skipped: int = 0,
        loss_scale: float | None = None,
        grad_norm: float | None = None,
    ) -> str:
        """The line for optimizer step `step`; throughput is that since the last line. Starts counting anew."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        parts = [f"step {step}"]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if rates:
            parts.append("lr " + " ".join(f"{rate:.3g}" for rate in dict.fromkeys(float(rate) for rate in rates)))
        if grad_norm is not None:
            parts.append(f"grad norm {grad_norm:.3g}")
        if self._steps:
            parts.append(f"{seconds / self._steps * 1e3:.4g} ms a step")
        if self._samples:
            parts.append(f"{self._samples / seconds:.4g} samples/s")
        if self._tokens:
            parts.append(f"{format_count(self._tokens / seconds)} tokens/s")
        if loss_scale is not None:
            parts.append(f"loss scale {loss_scale:g}")
        if skipped:
            parts.append(f"{skipped} skipped")
        self.restart()
        return ", ".join(parts)


def memory_line(categories: Mapping[str, int]) -> str:
    """Bytes on this rank by category, as one line: the largest first, then their sum; empty ones left out."""
    shown = sorted(((name, size) for name, size in categories.items() if size), key=lambda item: -item[1])
    parts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in shown]
    return f"memory a rank {format_bytes(sum(categories.values()))}" + (": " + ", ".join(parts) if parts else "")


def format_bytes(count: float) -> str:
    """A number of bytes for people, in binary units: 1536 is "1.50 KiB"."""
    size = float(count)
    for unit in _BYTE_UNITS:
        if abs(size) < 1024 or unit == _BYTE_UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("the last unit always returns")


def format_count(count: float) -> str:
    """A large number for people, in decimal units: 12345 is "12.3k"."""
    size = float(count)
    for unit in _COUNT_UNITS:
        if abs(size) < 1000 or unit == _COUNT_UNITS[-1]:
            return f"{size:.3g}{unit}"
        size /= 1000
    raise AssertionError("the last unit always returns")
