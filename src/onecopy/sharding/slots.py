"""Slots: the preallocated buffers that units' whole parameters borrow, and the only place their memory comes from.

Note "saved views". Autograd keeps views of a weight (a transpose, say) that alias the slot the weight lay in. A call of
a unit therefore remembers the slot it used, and before its backward the unit comes back to that very slot, refilled.
Two units that are in use together never share a slot. `tests/sharding/test_slots.py` breaks if either is given up.
"""

import itertools
from typing import TYPE_CHECKING

import torch

from onecopy.comm import Communicator, PendingGather
from onecopy.sharding.flat_buffer import FlatBuffer
from onecopy.sharding.region import Region

if TYPE_CHECKING:
    from onecopy.sharding.unit import Unit

_REGION = 256  # bytes; a flat buffer inside a slot starts at a multiple of it
_LIKE = 0.5  # units at least this fraction of a class's largest unit share its slots


def region_bytes(flat: FlatBuffer) -> int:
    return -(-flat.nbytes // _REGION) * _REGION


class Slot:
    """Bytes that one unit's whole parameters occupy at a time.

    Attributes:
        owner: the unit whose weights lie here now (or are arriving), if any.
        pins: how many forwards and backwards under way need the owner's weights.
    """

    def __init__(self, memory: torch.Tensor, name: str) -> None:
        self.memory = memory
        self.name = name
        self.owner: Unit | None = None
        self.pins = 0
        self.gathers: list[PendingGather] = []
        self.ready = True
        self._regions: dict[int, Region] = {}

    def __repr__(self) -> str:
        return f"Slot({self.name}: {self.memory.nbytes} bytes, holds {self.owner.name if self.owner else 'nothing'}, {self.pins} pins)"

    def region(self, flat: FlatBuffer, offset: int) -> Region:
        """Where the flat buffer's weights lie: at byte `offset`."""
        found = self._regions.get(flat.key)
        if found is None:
            found = self._regions[flat.key] = Region(flat, self.memory, offset, flat.dtype)
        return found

    def wait(self) -> None:
        """Return when the owner's weights are whole."""
        if not self.ready:
            for gather in self.gathers:
                gather.wait()
            self.ready = True

    def drain(self) -> None:
        """Return when nobody reads or writes the slot's bytes any more."""
        for gather in self.gathers:
            gather.drain()
        self.gathers.clear()
        self.ready = True


class SlotPool:
    """The slots of one engine, in size classes, so that one large unit does not make every slot large."""

    def __init__(self, units: "list[Unit]", per_class: int, communicator: Communicator) -> None:
        self._allocate = communicator.allocate
        self.slots: list[Slot] = []
        self.storages: set[int] = set()  # of the slots' memory, to tell a view of a weight from other tensors
        self._class_of: dict[Unit, list[Slot]] = {}
        self._per_class = per_class
        # What the root owns is in use from the forward to the end of the backward: it has a slot to itself.
        alone = [[unit] for unit in units if unit.slot_bytes and unit.resident]
        for members in alone + _size_classes([unit for unit in units if unit.slot_bytes and not unit.resident]):
            self._make_class(members, units)
        self.assign(units)

    def _make_class(self, members: "list[Unit]", order: "list[Unit]") -> None:
        positions = sorted(order.index(unit) for unit in members)
        neighbours = any(b - a == 1 for a, b in itertools.pairwise(positions))
        count = min(len(members), self._per_class) if neighbours else 1
        size = max(unit.slot_bytes for unit in members)
        slots = [self._new_slot(size, f"{members[0].name}/{k}") for k in range(count)]
        for unit in members:
            self._class_of[unit] = slots

    def assign(self, order: "list[Unit]") -> None:
        """Give every unit a home slot, neighbours in `order` different ones. Only between windows: see "saved views"."""
        taken: dict[int, int] = {}
        for unit in order:
            slots = self._class_of.get(unit)
            if slots is not None:
                place = taken.get(id(slots), 0)
                unit.home = slots[place % len(slots)]
                taken[id(slots)] = place + 1

    def choose(self, unit: "Unit") -> Slot:
        """A slot for `unit` that nobody needs now: its home, another of its class, or a new one.

        A new one is allocated only when the model uses more units at once than there are slots.
        """
        assert unit.home is not None
        if unit.home.pins == 0:
            return unit.home
        slots = self._class_of[unit]
        for slot in slots:
            if slot.pins == 0:
                return slot
        slots.append(self._new_slot(slots[0].memory.nbytes, f"{unit.name}/{len(slots)}"))
        return slots[-1]

    def _new_slot(self, nbytes: int, name: str) -> Slot:
        slot = Slot(self._allocate(nbytes), name)
        self.slots.append(slot)
        self.storages.add(slot.memory.untyped_storage()._cdata)  # not data_ptr: it is 0 without real memory
        return slot

    def free(self) -> None:
        """Give the memory back; the slots cannot be used again."""
        for slot in self.slots:
            slot.drain()
            slot.memory = slot.memory.new_empty(0)
            slot._regions.clear()

    def shared(self, unit: "Unit") -> bool:
        """Whether other units borrow `unit`'s slots, so that its weights are gone when theirs are here."""
        members = sum(1 for slots in self._class_of.values() if slots is self._class_of.get(unit))
        return members > len(self._class_of.get(unit, ()))

    @property
    def nbytes(self) -> int:
        return sum(slot.memory.nbytes for slot in self.slots)


def _size_classes(units: "list[Unit]") -> "list[list[Unit]]":
    """Units of like size together, largest class first; the order inside a class is the order given."""
    classes: list[list[Unit]] = []
    largest: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.slot_bytes):
        if classes and unit.slot_bytes >= _LIKE * largest[-1]:
            classes[-1].append(unit)
        else:
            classes.append([unit])
            largest.append(unit.slot_bytes)
    position = {unit: place for place, unit in enumerate(units)}
    return [sorted(members, key=position.__getitem__) for members in classes]
