"""The life of a unit in a step: flat buffers, slots, gathering, reducing, releasing."""

from onecopy.sharding.build import BuildRules, build_unfrozen, build_units
from onecopy.sharding.discover import UnitRules, choose_small, discover_units
from onecopy.sharding.flat_buffer import FlatBuffer
from onecopy.sharding.gathering import Limits
from onecopy.sharding.gradients import FlatGradient, Gradients
from onecopy.sharding.parameter import GuardedParameter, ZeroParamStatus
from onecopy.sharding.runtime import Runtime
from onecopy.sharding.slots import SlotPool
from onecopy.sharding.unit import Unit

__all__ = [
    "BuildRules",
    "FlatBuffer",
    "FlatGradient",
    "Gradients",
    "GuardedParameter",
    "Limits",
    "Runtime",
    "SlotPool",
    "Unit",
    "UnitRules",
    "ZeroParamStatus",
    "build_unfrozen",
    "build_units",
    "choose_small",
    "discover_units",
]
