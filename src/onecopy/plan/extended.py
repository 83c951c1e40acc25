"""A deep model's rehearsal from two shallow ones: equal blocks are traced once, and what a block adds is added for the rest.

Bytes at one distance from the first or the last block grow by a constant a block, so two depths say all others. The peak stays
that of `Estimator.peak`; this gives the timeline, categories and modules around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from onecopy.engine.whereabouts import block_of
from onecopy.errors import PlanError
from onecopy.observe.ledger import CATEGORIES, Ledger
from onecopy.plan.rehearsal import Rehearsal

DEEP = 48  # blocks: with more, a whole rehearsal takes longer than people wait
_POINTS = 8  # of each stretch
_SLOPE = 80  # points between the first and the last blocks


def _between(start: dict[str, int], stop: dict[str, int], share: float) -> dict[str, int]:
    return {name: int(size + share * (stop[name] - size)) for name, size in start.items()}


@dataclass
class ExtendedWindow:
    """The part of `Window` that answers read."""

    start: int
    stop: int
    sent: dict[str, Any] = field(default_factory=dict)


@dataclass
class ExtendedLedger:
    """The part of `Ledger` that answers read."""

    marks: list[tuple[int, str]]


class Extended:
    """What `Rehearsal` answers, for `layers` blocks from rehearsals of `low` and `high` blocks of the same setting.

    Args:
        peak: bytes at the peak, found by `Estimator.peak`; what the categories lack to it is counted as temporaries.
        numel, model_bytes: of the whole model.
    """

    def __init__(
        self,
        low: Rehearsal,
        high: Rehearsal,
        depths: tuple[int, int],
        layers: int,
        peak: int,
        numel: int,
        model_bytes: int,
    ) -> None:
        self.peak, self.numel, self.model_bytes = peak, numel, model_bytes
        self._more = (layers - depths[1]) / (depths[1] - depths[0])
        self._low, self._high = low, high
        self._line: list[tuple[int, dict[str, int]]] = []
        marks = []
        for label, values in self._stretches(_stretches(low), _stretches(high)):
            marks += [(len(self._line), label)] if label else []
            self._line += [(len(self._line) + place, held) for place, held in enumerate(values)]
        top = max(range(len(self._line)), key=lambda index: sum(self._line[index][1].values()))
        held = self._line[top][1]
        held["temporaries"] = max(0, held["temporaries"] + peak - sum(held.values()))
        self._held = held
        self.resting = self._grow(low.resting, high.resting)
        self.ledger = ExtendedLedger(marks)
        sent = {kind: self._plus(low.windows[-1].sent["bytes_by_kind"].get(kind, 0), size)
                for kind, size in high.windows[-1].sent["bytes_by_kind"].items()}  # fmt: skip
        calls = {kind: self._plus(low.windows[-1].sent["collectives_by_kind"].get(kind, 0), count)
                 for kind, count in high.windows[-1].sent["collectives_by_kind"].items()}  # fmt: skip
        self.windows = [
            ExtendedWindow(0, len(self._line), {
                "bytes_sent": sum(sent.values()), "collectives": sum(calls.values()), "bytes_by_kind": sent, "collectives_by_kind": calls,
            }),
        ]  # fmt: skip

    def _plus(self, small: float, large: float) -> int:
        return max(0, int(large + self._more * (large - small)))

    def _grow(self, small: dict[str, int], large: dict[str, int]) -> dict[str, int]:
        return {name: self._plus(small[name], large[name]) for name in CATEGORIES}

    def _stretches(self, low: list[Stretch], high: list[Stretch]) -> Iterator[tuple[str, list[dict[str, int]]]]:
        """The deep model's stretches: those at one distance from a group's start or end grow; between them is a slope."""
        small, large = groups_of(low), groups_of(high)
        if len(small) != len(large):
            raise PlanError(
                "blocks of this model do not follow each other in the same way at every depth; plan it with fewer of them"
            )
        for first, second in zip(small, large):
            ends = min(2, len(first)) if second[0].block else 1
            grown = [[self._grow(a, b) for a, b in zip(one.points, other.points)] for one, other in
                     [*zip(first[:ends], second[:ends]), *(zip(first[-ends:], second[-ends:]) if second[0].block else ())]]  # fmt: skip
            yield second[0].label, grown[0]
            for values in grown[1:ends]:
                yield "", values
            if len(grown) > ends:
                start, stop = grown[ends - 1][-1], grown[ends][0]
                yield "", [_between(start, stop, (place + 1) / (_SLOPE + 1)) for place in range(_SLOPE)]
            for values in grown[ends:]:
                yield "", values

    def at_peak(self) -> dict[str, int]:
        """Bytes by category; their sum is the peak."""
        return dict(self._held)

    def timeline(self, points: int = 400) -> list[tuple[int, dict[str, int]]]:
        """(place, bytes by category) over the step."""
        return self._line

    def holders(self, most: int = 12) -> list[tuple[str, str, int]]:
        """Modules at the peak: (module, category, bytes), largest first; equal blocks are one."""
        small, large = ({(m, c): b for m, c, b in run.holders(1000)} for run in (self._low, self._high))
        grown = {key: self._plus(small.get(key, size), size) for key, size in large.items()}
        ranked = sorted(grown.items(), key=lambda item: -item[1])
        return [(module, category, nbytes) for (module, category), nbytes in ranked[:most]]


@dataclass
class Stretch:
    """Part of a step: one block's, or what lies between blocks. `points` are its highest moments at equal shares of it."""

    label: str
    block: str
    points: list[dict[str, int]]


def _stretches(run: Rehearsal) -> list[Stretch]:
    """The last window, cut where a phase, a block or what lies between blocks begins."""
    window, ledger = run.windows[-1], run.ledger
    marks = dict(ledger.marks)
    cuts = [(window.start, marks.get(window.start, ""), "")]
    for place in range(window.start, window.stop):
        event = ledger.events[place]
        if place in marks and place > window.start:
            cuts.append((place, marks[place], ""))
        elif event > 0:
            entry = ledger.entries[event - 1]
            block = block_of(entry.module) if entry.stretch == "block" and entry.phase != "step" else ""
            if block != cuts[-1][2]:
                cuts.append((place, "", block))
    ends = [place for place, _, _ in cuts[1:]] + [window.stop]
    return [
        Stretch(label, block, _resampled(ledger, at, end)) for (at, label, block), end in zip(cuts, ends) if end > at
    ]


def groups_of(stretches: list[Stretch]) -> list[list[Stretch]]:
    """Blocks that follow each other, together; all else alone."""
    groups: list[list[Stretch]] = []
    for stretch in stretches:
        if stretch.block and groups and groups[-1][-1].block:
            groups[-1].append(stretch)
        else:
            groups.append([stretch])
    return groups


def _resampled(ledger: Ledger, start: int, stop: int) -> list[dict[str, int]]:
    """`_POINTS` moments of a stretch, each the highest of its share of it."""
    line = ledger.timeline(start, stop, max(1, stop - start))
    shares = []
    for place in range(_POINTS):
        first = len(line) * place // _POINTS
        last = max(first + 1, len(line) * (place + 1) // _POINTS)
        shares.append(max((values for _, values in line[first:last]), key=lambda values: sum(values.values())))
    return shares
