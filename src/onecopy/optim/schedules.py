"""From `scheduler: {type, params}` of the configuration to a schedule object; DeepSpeed's five schedules by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from onecopy.errors import ConfigError
from onecopy.optim.schedule_formulas import LRRangeTest, OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]

_SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule for schedule in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}

VALID_LR_SCHEDULES = list(_SCHEDULES)
"""Names that DeepSpeed's configurations use."""

# They are made from other schedule objects or functions, which JSON cannot hold.
_NEED_OBJECTS = ("SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR")


def build_scheduler(name: str, params: Mapping[str, Any] | None, optimizer: Any) -> Any:
    """The schedule that the configuration means, on `optimizer` (ours or any `torch.optim.Optimizer`).

    DeepSpeed's five by their names, otherwise a class of `torch.optim.lr_scheduler` by its exact name. Not collective.
    Raises `ConfigError` naming key, value and fix: unknown names and parameters, missing ones, "auto", wrong values.
    """
    schedule_class = _schedule_class(name)
    arguments = dict(params or {})
    _check_names(name, schedule_class, arguments)
    try:
        return schedule_class(optimizer, **arguments)
    except ConfigError as error:
        raise ConfigError(f"scheduler.params: {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"scheduler.params: {name} says: {error}") from error


def _torch_schedules() -> dict[str, type]:
    module = torch.optim.lr_scheduler
    found = {}
    for name in dir(module):
        candidate = getattr(module, name)
        if name.startswith("_") or name == "LRScheduler" or not inspect.isclass(candidate):
            continue
        if issubclass(candidate, module.LRScheduler):
            found[name] = candidate
    return found


def _schedule_class(name: object) -> Any:
    if not isinstance(name, str):
        raise ConfigError(f'scheduler.type is {name!r}; write the name of a schedule, for example "WarmupLR".')
    if name in _SCHEDULES:
        return _SCHEDULES[name]
    torch_schedules = _torch_schedules()
    if name in _NEED_OBJECTS:
        raise ConfigError(
            f"scheduler.type {name!r} is made from functions or other schedules, which JSON cannot hold; pass "
            f"initialize(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.{name}(optimizer, ...)) instead."
        )
    if name in torch_schedules:
        return torch_schedules[name]
    known = [*VALID_LR_SCHEDULES, *(key for key in torch_schedules if key not in _NEED_OBJECTS)]
    by_lower = {key.lower(): key for key in reversed(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[near[0]]!r}? " if near else ""
    raise ConfigError(f"scheduler.type {name!r} is unknown: {hint}Known: {', '.join(known)}.")


def _check_names(name: str, schedule_class: Any, arguments: dict[str, Any]) -> None:
    signature = inspect.signature(schedule_class.__init__)
    accepted = {key: p for key, p in signature.parameters.items() if key not in ("self", "optimizer")}
    for key, value in arguments.items():
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"scheduler.params.{key} is unknown to {name}: {hint}Accepted: {', '.join(accepted)}.")
        if value == "auto":
            raise ConfigError(f'scheduler.params.{key}: "auto" was not resolved by the trainer; write a number.')
    missing = [key for key, p in accepted.items() if p.default is inspect.Parameter.empty and key not in arguments]
    if missing:
        raise ConfigError(f"scheduler.params: {name} needs {', '.join(missing)}; add {missing[0]!r} with a number.")
