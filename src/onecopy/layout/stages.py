"""A ZeRO stage is a row of this table: where each kind of training state lives."""

from dataclasses import dataclass
from enum import Enum


class Place(Enum):
    """Where one kind of state lives across the ranks of a shard group."""

    WHOLE = "whole"  # every rank holds all of it
    SHARDED = "sharded"  # rank r holds the r-th of N equal parts

    @property
    def sharded(self) -> bool:
        return self is Place.SHARDED


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of the three kinds of state; the engine reads these and never the stage's number."""

    parameters: Place
    gradients: Place
    optimizer: Place


_TABLE = {
    0: Placement(parameters=Place.WHOLE, gradients=Place.WHOLE, optimizer=Place.WHOLE),
    1: Placement(parameters=Place.WHOLE, gradients=Place.WHOLE, optimizer=Place.SHARDED),
    2: Placement(parameters=Place.WHOLE, gradients=Place.SHARDED, optimizer=Place.SHARDED),
    3: Placement(parameters=Place.SHARDED, gradients=Place.SHARDED, optimizer=Place.SHARDED),
}


def placement_for_stage(stage: int, world_size: int) -> Placement:
    """The row of `stage`; with one rank a shard is the whole, so nothing is ever gathered or released.

    Raises:
        ValueError: `stage` is not 0, 1, 2 or 3.
    """
    if stage not in _TABLE:
        raise ValueError(f"zero_optimization.stage is {stage}; it must be 0, 1, 2 or 3")
    row = _TABLE[stage]
    if world_size > 1:
        return row
    return Placement(parameters=Place.WHOLE, gradients=row.gradients, optimizer=row.optimizer)
