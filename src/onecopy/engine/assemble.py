"""From a model, an optimizer and a configuration to the engine's parts: which parameters are trained, in what dtype, where."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.config import Config
from onecopy.engine.dtypes import compute_dtype_rule
from onecopy.errors import ModelError
from onecopy.layout import Placement
from onecopy.observe.log import note
from onecopy.optim.muon_groups import mark_matrices
from onecopy.optim.registry import build_optimizer, refuse_reason
from onecopy.sharding import BuildRules, SlotPool, Unit, UnitRules, build_units, choose_small, discover_units

_NOTHING_TO_TRAIN = (
    "there is no parameter to train: model_parameters is empty, or every parameter has requires_grad=False"
)
_SMALL_SHARE = 0.01  # of the model: what stays whole at stage 3 when the user did not say


@dataclass
class TrainedParameters:
    """The inner optimizer as the user gave it (still on the model's parameters), and which group trains which."""

    optimizer: torch.optim.Optimizer | None
    group_of: dict[int, int]


def choose_optimizer(
    model: nn.Module, config: Config, optimizer: Any, model_parameters: Iterable[Any] | None
) -> TrainedParameters:
    """Take the client's optimizer, call the client's factory, or build the configured one.

    Raises:
        ModelError: it is wrong on shards, trains foreign parameters, or trains none.
        ConfigError: the configured type or its parameters are unknown.
    """
    given = list(model_parameters) if model_parameters is not None else None
    if given == [] and optimizer is None and config.optimizer is None:
        raise ModelError(
            "model_parameters is empty: give the parameters to train, or leave it out to train all that require gradients"
        )
    inner: torch.optim.Optimizer | None
    if isinstance(optimizer, torch.optim.Optimizer):
        inner = optimizer
        if config.optimizer is not None:
            note(
                f"the configuration's optimizer ({config.optimizer.type}) is not used: initialize was given a {type(optimizer).__name__}"
            )
    elif callable(optimizer):
        inner = optimizer(given if given is not None else [p for p in model.parameters() if p.requires_grad])
    elif optimizer is not None:
        raise ModelError(
            f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or a function that makes one from parameters. "
            "For several optimizers give one with a group for each, or call initialize once for each part of the model"
        )
    elif config.optimizer is not None:
        groups = given if given is not None else _trained_now_or_later(model)
        if not groups or not any(True for _ in _parameters_in(groups)):
            raise ModelError(_NOTHING_TO_TRAIN)
        if config.optimizer.type.lower() == "muon":
            mark_matrices(model)
        inner = build_optimizer(config.optimizer.type, dict(config.optimizer.params), groups)
    else:
        return TrainedParameters(None, {})
    assert inner is not None
    return TrainedParameters(inner, _groups_of(model, inner))


def _trained_now_or_later(model: nn.Module) -> list[nn.Parameter]:
    """What gradients can be computed for; what is frozen waits in its group, and costs nothing until it is unfrozen."""
    found = [p for p in model.parameters() if p.requires_grad or p.is_floating_point()]
    return found if any(p.requires_grad for p in found) else []


def _parameters_in(groups: Sequence[Any]) -> Iterable[Any]:
    for entry in groups:
        if isinstance(entry, dict):
            params = entry["params"]
            yield from [params] if isinstance(params, torch.Tensor) else list(params)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry  # a name with its parameter


def _groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    reason = refuse_reason(optimizer)
    if reason is not None:
        raise ModelError(reason)
    owned = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in owned:
                raise ModelError(
                    f"the optimizer's group {index} holds a tensor of shape {list(parameter.shape)} (place {place}) "
                    "that is no parameter of the model given to initialize; "
                    "build the optimizer from this model's parameters, after moving or replacing them"
                )
            assert id(parameter) not in group_of, (
                f"parameter '{owned[id(parameter)]}' is in two groups of the optimizer"
            )
            if parameter.is_complex():
                raise ModelError(
                    f"parameter '{owned[id(parameter)]}' is {parameter.dtype}, and gradients are summed as real numbers; "
                    "hold its real and imaginary parts in a real parameter (torch.view_as_real) or freeze it"
                )
            group_of[id(parameter)] = index
    if not any(p.requires_grad and p.numel() for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(_NOTHING_TO_TRAIN)
    return group_of


def check_free(model: nn.Module, group_of: dict[int, int]) -> None:
    """Refuse parameters that another engine trains or shards.

    Raises:
        ModelError: names the parameter in both engines.
    """
    for name, parameter in model.named_parameters():
        home = getattr(parameter, "_onecopy", None)
        if home is None or not home.runtime.attached:
            continue
        trained = id(parameter) in group_of and parameter.requires_grad
        if trained or any(parameter is p for flat in home.unit.sharded for p in flat.parameters):
            raise ModelError(
                f"parameter '{name}' already belongs to another engine (as '{home.name}'); "
                "one parameter can be trained by one engine: put both models into one module, or share a frozen copy"
            )


def unit_rules(config: Config) -> UnitRules:
    """What the configuration says about unit boundaries."""
    zero = config.zero
    leaf = zero.leaf_module
    return UnitRules(
        classes=(*config.onecopy.unit_classes, *leaf.classes),
        names=tuple(leaf.names),
        name_suffixes=tuple(leaf.name_suffixes),
        granularity=zero.module_granularity_threshold,
    )


def find_blocks(model: nn.Module, config: Config) -> list[tuple[str, nn.Module]]:
    """The modules of units with their names, in module order; weights must not have moved into the units yet."""
    return [(plan.name, plan.module) for plan in discover_units(model, unit_rules(config)) if plan.module is not None]


def make_units(
    model: nn.Module, config: Config, placement: Placement, group_of: dict[int, int], communicator: Communicator
) -> list[Unit]:
    """Cut the model into units and move its weights into them. Frees the parameters' storage unit by unit."""
    zero = config.zero
    plans = discover_units(model, unit_rules(config))
    total = sum(p.numel() for plan in plans for _, p in plan.parameters)
    if "param_persistence_threshold" in zero.given or "model_persistence_threshold" in zero.given:
        most = zero.model_persistence_threshold
    else:
        most = int(_SMALL_SHARE * total)
    small = choose_small(plans, zero.param_persistence_threshold, most, lambda p: p.requires_grad and id(p) in group_of)
    bucket = zero.reduce_bucket_size
    if not placement.parameters.sharded:
        bucket = min(bucket, zero.allgather_bucket_size or bucket)
    return build_units(
        plans, BuildRules(placement, compute_dtype_rule(model, config), group_of, small, bucket), communicator
    )


def make_slots(units: Sequence[Unit], config: Config, communicator: Communicator) -> SlotPool:
    """Slots as many as configured, fewer where the user's `stage3_max_live_parameters` is smaller.

    Its default does not count: blocks of more than half of it would have one slot, and nothing would overlap.
    """
    largest = max((unit.numel for unit in units), default=0)
    per_class = config.onecopy.slots
    if largest and "max_live_parameters" in config.zero.given:
        per_class = max(1, min(per_class, config.zero.max_live_parameters // largest))
    return SlotPool([unit for unit in units if unit.sharded], per_class, communicator)


def overlaps(config: Config) -> bool:
    """Unset means yes: waiting at once is only asked for to find a fault."""
    return config.zero.overlap_comm is not False
