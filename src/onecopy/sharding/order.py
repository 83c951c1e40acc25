"""The recorded order in which units are used; prefetch reads what comes next from it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onecopy.sharding.unit import Unit


class Order:
    """One recorded sequence of uses a mode ("train", "evaluate"); it predicts for as long as reality follows it.

    A changed path is no error: predictions stop for the rest of this pass and the new path is what the next one is
    compared with.
    """

    def __init__(self, guess: "list[Unit]") -> None:
        forward = [(unit, False) for unit in guess]
        self._recorded: dict[str, list[tuple[Unit, bool]]] = {
            "train": forward + [(unit, True) for unit in reversed(guess)],
            "evaluate": forward,
        }
        self._mode = ""
        self._current: list[tuple[Unit, bool]] = []
        self._following = False

    def begin(self, mode: str) -> None:
        """A forward starts a new pass, unless it is a further forward of the same micro-batch (no backward yet)."""
        if self._current and mode == self._mode and mode == "train" and not self._current[-1][1]:
            return
        self.close()
        self._mode = mode
        self._following = True

    def close(self) -> None:
        """The pass is over: keep it as what its mode is expected to do next time."""
        if self._current:
            self._recorded[self._mode] = self._current
        self._current = []
        self._following = False

    def use(self, unit: "Unit", backward: bool) -> None:
        """Record that `unit` is needed now."""
        expected = self._recorded.get(self._mode, ())
        place = len(self._current)
        if self._following and (place >= len(expected) or expected[place] != (unit, backward)):
            self._following = False
        self._current.append((unit, backward))

    def upcoming(self) -> "Iterator[tuple[Unit, bool]]":
        """The uses expected next, nearest first; nothing when reality has left the record."""
        if self._following:
            expected = self._recorded.get(self._mode, ())
            for place in range(len(self._current), len(expected)):
                yield expected[place]

    def distance_to_next_use(self, unit: "Unit") -> int | None:
        """Elements of other units used before `unit` is used again; None when no further use is expected."""
        elements = 0
        for other, _ in self.upcoming():
            if other is unit:
                return elements
            elements += other.numel
        return None

    def forward_units(self) -> "list[Unit]":
        """The units in the order of their first use in the last training pass."""
        record = self._current if self._mode == "train" and self._current else self._recorded["train"]
        return list(dict.fromkeys(unit for unit, backward in record if not backward))
