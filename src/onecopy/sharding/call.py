"""One forward that is under way or waits for its backward: what it used, and where that lay."""

from dataclasses import dataclass, field

from onecopy.sharding.slots import Slot
from onecopy.sharding.unit import Unit


@dataclass(eq=False, slots=True)
class Call:
    """One forward of a unit (or of the model: `unit` None): what its backward needs back, and where.

    Attributes:
        sequence: calls are numbered in the order they began.
        forward: the number of the model's forward it belongs to.
        of_model: it is a forward of the whole model.
        leases: the units it used and the slots they lay in; see the note in `slots.py`.
    """

    unit: Unit | None
    sequence: int
    forward: int
    of_model: bool = False
    leases: list[tuple[Unit, Slot]] = field(default_factory=list)
