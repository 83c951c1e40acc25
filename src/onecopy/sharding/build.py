"""From unit plans to units with memory: which flat buffers a unit gets, and in what order parameters lie in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.layout import ALIGNMENT, Place, Placement, round_up
from onecopy.sharding.discover import UnitPlan
from onecopy.sharding.flat_buffer import FlatBuffer
from onecopy.sharding.parameter import GUARDED, UNGUARDED
from onecopy.sharding.pending import take_weights
from onecopy.sharding.unit import Unit

SMALL = "(small parameters)"

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class BuildRules:
    """What decides the flat buffers.

    Attributes:
        placement: the stage's row.
        compute_dtype: the dtype a parameter is used in, by its qualified name.
        group_of: optimizer group by parameter identity; parameters not in it are not trained.
        small: identities of parameters that stay whole although parameters are sharded.
        bucket_elements: the most elements of one flat buffer (one parameter at least).
    """

    placement: Placement
    compute_dtype: Callable[[str, nn.Parameter], torch.dtype]
    group_of: Mapping[int, int]
    small: frozenset[int] | set[int]
    bucket_elements: int


def build_units(plans: Sequence[UnitPlan], rules: BuildRules, communicator: Communicator) -> list[Unit]:
    """Make the units in plan order, small parameters' unit last; the parameters' original storage is freed on the way.

    Frozen parameters of whole placement need no buffer: they stay the tensors they are, in the compute dtype.
    """
    small = UnitPlan(SMALL, None)
    units = []
    key = 0
    for plan in [*plans, small]:
        buffers = []
        kept: list[Named] = []
        for name, parameter in plan.parameters:
            if plan is not small and rules.placement.parameters.sharded and id(parameter) in rules.small:
                small.parameters.append((name, parameter))
            else:
                kept.append((name, parameter))
            if parameter.numel() == 0:  # it takes no room, but it takes part in computing
                parameter.data = take_weights(parameter).to(communicator.device, rules.compute_dtype(name, parameter))
        for dtype, trainable, members in _alike(kept, rules):
            place = rules.placement.parameters
            if plan is small or not all(shardable(parameter) for _, parameter in members):
                place = Place.WHOLE
            if not trainable and not place.sharded:
                for _, parameter in members:
                    parameter.data = take_weights(parameter).to(communicator.device, dtype)
                continue
            for bucket in _buckets(members, rules.bucket_elements):
                key += 1
                buffers.append(_flat_buffer(key, plan.name, bucket, dtype, place, trainable, rules, communicator))
        if buffers:
            units.append(Unit(plan.name, plan.module, buffers, resident=plan.module is None))
    return units


def build_unfrozen(
    name: str, members: Sequence[Named], rules: BuildRules, communicator: Communicator, last_key: int
) -> Unit:
    """A unit of parameters, whole on every rank so far, that are trained from now on; their keys follow `last_key`."""
    buffers: list[FlatBuffer] = []
    for dtype, _, alike in _alike(members, rules):
        for bucket in _buckets(alike, rules.bucket_elements):
            key = last_key + len(buffers) + 1
            buffers.append(_flat_buffer(key, name, bucket, dtype, Place.WHOLE, True, rules, communicator))
    return Unit(name, None, buffers, resident=True)


def _flat_buffer(
    key: int,
    unit: str,
    bucket: Sequence[Named],
    dtype: torch.dtype,
    place: Place,
    trainable: bool,
    rules: BuildRules,
    communicator: Communicator,
) -> FlatBuffer:
    names, parameters = [name for name, _ in bucket], [parameter for _, parameter in bucket]
    label = f"{unit} ({names[0]}{', ...' if len(names) > 1 else ''})"
    groups = [rules.group_of[id(p)] for p in parameters] if id(parameters[0]) in rules.group_of else None
    return FlatBuffer(
        key, label, parameters, names, dtype, place, groups, communicator, rules.placement, frozen=not trainable
    )


def shardable(parameter: nn.Parameter) -> bool:
    """Whether a parameter can be empty for a while: subclasses carry state of their own that a flat view would drop."""
    return type(parameter) in GUARDED or type(parameter) in UNGUARDED


def _alike(members: Sequence[Named], rules: BuildRules) -> Iterator[tuple[torch.dtype, bool, list[Named]]]:
    """Split into sets that can lie in one flat buffer: one dtype (given and used), trained or not, sharded or not.

    Frozen parameters that the optimizer has been given, and may train later, are a set too. Inside a set parameters are
    ordered by optimizer group, so that a group is one contiguous range.
    """
    sets: dict[tuple[torch.dtype, torch.dtype, bool, bool, bool], list[Named]] = {}
    for name, parameter in members:
        if parameter.numel() == 0:
            continue
        known = id(parameter) in rules.group_of
        trainable = known and parameter.requires_grad
        kind = (rules.compute_dtype(name, parameter), parameter.dtype, trainable, shardable(parameter), known)
        sets.setdefault(kind, []).append((name, parameter))
    for (dtype, _, trainable, _, known), members_alike in sets.items():
        if known:
            members_alike.sort(key=lambda member: rules.group_of[id(member[1])])
        yield dtype, trainable, members_alike


def _buckets(members: Sequence[Named], most: int) -> Iterator[list[Named]]:
    """Cut into runs of at most `most` elements; a parameter larger than that is a run of its own."""
    run: list[Named] = []
    elements = 0
    for name, parameter in members:
        size = round_up(parameter.numel(), ALIGNMENT)
        if run and elements + size > most:
            yield run
            run, elements = [], 0
        run.append((name, parameter))
        elements += size
    if run:
        yield run
