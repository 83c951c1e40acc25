"""The memory ledger: every storage from its birth to its death, on fake tensors and in real training alike.

One instrument for plan and reality: a dispatch mode sees every operation's results, enters each storage it has not seen
once, and a finalizer enters its death. Nothing is estimated, so two runs that do the same operations have the same
ledger to the byte, whether the bytes exist or not.

What a storage was for is decided when the run is over: one born in a forward that lives on into the backward was an
activation, one that did not was a temporary. Only the training state is named while it is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CATEGORIES = (
    "parameters", "slots", "gradients", "masters", "moments", "activations", "logits and loss", "temporaries", "batch",
)  # fmt: skip
STATES = CATEGORIES[:5]


@dataclass(slots=True)
class Entry:
    """One storage.

    Attributes:
        nbytes: its size.
        born, died: places in the ledger's sequence of births and deaths; died is None while it lives.
        phase: what the run was doing at its birth ("build", "forward", "backward", "step").
        last_phase: what it was doing at its death.
        module: the qualified name of the module it was born in.
        stretch: "block" inside a repeated block, "after" behind the last one, else "before".
        category: given for training state, else found by `label`.
    """

    nbytes: int
    born: int
    phase: str
    module: str
    stretch: str
    category: str = ""
    died: int | None = None
    last_phase: str = ""


ELSEWHERE: set[int] = set()
"""Addresses of storages that are mapped here and belong to another process (or are no training state): not counted."""


class Ledger(TorchDispatchMode):
    """Counts bytes of storages while it is entered (`with ledger:`); a storage born before is counted from `adopt` on.

    Attributes:
        events: +n at the birth and -n at the death of entry n - 1, in order.
        phase, module, stretch: where the run is now; `Whereabouts` keeps them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.events: list[int] = []
        self.marks: list[tuple[int, str]] = []
        self.live = 0
        self.peak = 0
        self.peak_at = 0
        self.phase = "build"
        self.module = ""
        self.stretch = "before"
        self.paused = 0
        self.operators: Any = (
            None  # a recorder of operators for the time model, called with (function, arguments, result)
        )
        self._of: dict[int, int] = {}
        self._finalizers: dict[int, Any] = {}

    # ------------------------------------------------------------------------------------------------------- recording
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            if isinstance(result, torch.Tensor):
                self.see(result)
            elif result is not None:
                for tensor in tensors_in(result):
                    self.see(tensor)
            if self.operators is not None:
                self.operators(func, args, kwargs or {}, result)
        return result

    def see(self, tensor: torch.Tensor, category: str = "") -> int | None:
        """Enter the tensor's storage if it is new; returns its entry's number, None for tensors without storage."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._of.get(key)
        if number is None:
            if ELSEWHERE and storage.data_ptr() in ELSEWHERE:
                return None
            number = self.open(storage.nbytes(), category)
            self.bind(storage, number)
        elif category:
            self.entries[number].category = category
        return number

    def bind(self, storage: torch.UntypedStorage, number: int) -> None:
        """Let the death of `storage` be the death of entry `number`."""
        key = storage._cdata
        self._of[key] = number
        self._finalizers[number] = weakref.finalize(storage, self._gone, key, number)
        self._finalizers[number].atexit = False

    def _gone(self, key: int, number: int) -> None:
        if self._of.get(key) == number:
            del self._of[key]
        self._finalizers.pop(number, None)
        self.close(number)

    def open(self, nbytes: int, category: str = "") -> int:
        """Enter a birth of `nbytes`; returns the entry's number."""
        self.entries.append(Entry(nbytes, len(self.events), self.phase, self.module, self.stretch, category))
        self.events.append(len(self.entries))
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live
            self.peak_at = len(self.events)
        return len(self.entries) - 1

    def close(self, number: int) -> None:
        """Enter the death of an entry, once."""
        entry = self.entries[number]
        if entry.died is None:
            entry.died = len(self.events)
            entry.last_phase = self.phase
            self.events.append(-(number + 1))
            self.live -= entry.nbytes

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the entry of a tensor's storage, if it has one."""
        return self._of.get(tensor.untyped_storage()._cdata)

    def mark(self, text: str) -> None:
        """Remember what happens now: steps, micro-batches."""
        self.marks.append((len(self.events), text))

    def reset_peak(self) -> None:
        """Look for the peak from here on only."""
        self.peak = self.live
        self.peak_at = len(self.events)

    def adopt(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Enter (or name) storages of training state."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, category)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Births inside are not counted."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def stop(self) -> None:
        """Deaths after this are not entered: the run that is examined is over."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()
        self._of.clear()

    # ---------------------------------------------------------------------------------------------------------- reading
    def label(self) -> None:
        """Give every entry without one its category."""
        for entry in self.entries:
            if not entry.category:
                entry.category = _category_of(entry)

    def at(self, moment: int) -> list[Entry]:
        """The entries alive after `moment` events."""
        return [e for e in self.entries if e.born < moment and (e.died is None or e.died >= moment)]

    def by_category(self, moment: int) -> dict[str, int]:
        """Bytes alive after `moment` events, by category; the values' sum is all there is."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for entry in self.at(moment):
            totals[entry.category or _category_of(entry)] += entry.nbytes
        return totals

    def holders(self, moment: int, most: int = 12) -> list[tuple[str, str, int]]:
        """Which modules hold what is alive after `moment` events: (module, category, bytes), largest first.

        Blocks that differ only in their number are counted together, as `layers.*`.
        """
        totals: dict[tuple[str, str], int] = {}
        for entry in self.at(moment):
            key = (_without_numbers(entry.module), entry.category or _category_of(entry))
            totals[key] = totals.get(key, 0) + entry.nbytes
        ranked = sorted(totals.items(), key=lambda item: -item[1])
        return [(module, category, nbytes) for (module, category), nbytes in ranked[:most]]

    def timeline(self, start: int, stop: int, points: int = 400) -> list[tuple[int, dict[str, int]]]:
        """Bytes by category between two moments; of every stretch of events the highest moment is kept.

        Returns:
            (moment, bytes by category), in order; the peak is among them.
        """
        self.label()
        now = self.by_category(start)
        total = sum(now.values())
        width = max(1, (stop - start) // points)
        line = [(start, dict(now))]
        best, best_total = None, -1
        for place in range(start, stop):
            event = self.events[place]
            entry = self.entries[abs(event) - 1]
            change = entry.nbytes if event > 0 else -entry.nbytes
            now[entry.category] += change
            total += change
            if total > best_total:
                best, best_total = (place + 1, dict(now)), total
            if (place - start) % width == width - 1 or place == stop - 1:
                assert best is not None
                line.append(best)
                best, best_total = None, -1
        return line


def _category_of(entry: Entry) -> str:
    if entry.phase in ("forward", "backward") and entry.stretch == "after":
        return "logits and loss"
    if entry.phase == "forward":
        return "temporaries" if entry.last_phase == "forward" else "activations"
    if entry.phase == "recompute":
        return "activations"
    return "temporaries"


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the arguments or results of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
