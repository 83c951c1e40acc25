"""Bring units' weights into slots: when they are used, and ahead of that as far as the recorded order tells."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from onecopy.sharding.order import Order
from onecopy.sharding.slots import Slot, SlotPool
from onecopy.sharding.unit import Unit


@dataclass(frozen=True)
class Limits:
    """How far the configuration lets gathering run ahead and weights linger, in elements."""

    prefetch_elements: int
    reuse_elements: int
    overlap: bool


class Gathering:
    """Which unit's weights lie in which slot, and who needs them there.

    A slot is left only when another unit needs it, so a unit that still owns its slot needs no communication.
    """

    def __init__(
        self, slots: SlotPool, order: Order, limits: Limits, phase: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self.slots = slots
        self.order = order
        self.limits = limits
        self.phase = phase

    def pin(self, unit: Unit, slot: Slot | None = None) -> Slot:
        """Let `unit`'s parameters be its weights, in `slot` if one is named, until `let_go`; gathers unless they are there."""
        target = slot or unit.slot or self.slots.choose(unit)
        if target.owner is not unit:
            self._gather(unit, target)
        if unit.slot is not target:
            unit.slot = target
        with self.phase("gather wait"):
            unit.bind()
        target.pins += 1
        return target

    @staticmethod
    def let_go(unit: Unit, slot: Slot) -> None:
        """A use of `unit` is over. Its weights may stay, but who reads them from now on is seen, and pins them again."""
        slot.pins -= 1
        if slot.pins == 0 and slot.owner is unit:
            unit.guard()

    def _gather(self, unit: Unit, slot: Slot) -> None:
        if slot.owner is not None:
            slot.owner.release()
        if unit.slot is not None:
            unit.slot.owner = None
        unit.gather_into(slot)

    def start_next(self) -> None:
        """Start the gathers that come next in the recorded order, as far as slots and the configured bound allow.

        A bound above 0 always lets one unit through: with one smaller than a block nothing would overlap, and slots are there anyway.
        """
        if not self.limits.overlap or not self.slots.slots:  # nothing is gathered where weights are whole
            return
        elements = self.limits.prefetch_elements
        needed: set[Unit] = set()
        for unit, backward in self.order.upcoming():
            if not unit.sharded or (backward and not unit.needs_weights_in_backward):
                continue
            if unit.slot is None:
                slot = unit.home
                if elements <= 0 or slot is None or slot.pins or slot.owner in needed:
                    return
                self._gather(unit, slot)
                elements -= unit.numel
            needed.add(unit)
            if len(needed) >= len(self.slots.slots):
                return

    def release_if_far(self, unit: Unit) -> None:
        """Give up weights that nobody needs now and that the order needs later than the configured distance."""
        if unit.slot is not None and unit.slot.pins == 0:
            distance = self.order.distance_to_next_use(unit)
            if distance is None or distance > self.limits.reuse_elements:
                unit.release()
