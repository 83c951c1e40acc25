"""Pure integers: where each parameter lies in a flat buffer, which part a rank owns, where a stage keeps each state."""

from onecopy.layout.boxes import Box, boxes
from onecopy.layout.flat import ALIGNMENT, FlatLayout, ParameterRange, round_up
from onecopy.layout.stages import Place, Placement, placement_for_stage

__all__ = [
    "ALIGNMENT",
    "Box",
    "FlatLayout",
    "ParameterRange",
    "Place",
    "Placement",
    "boxes",
    "placement_for_stage",
    "round_up",
]
