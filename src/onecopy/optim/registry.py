"""Which optimizers may step flat shards: built by name from the configuration, or refused with the reason.

A shard is a flat range that starts and ends anywhere inside parameters. An optimizer is right on it only when every
element's update depends on that element alone (elementwise), or when it fetches the rest from the other ranks, as the
package's own `Lamb` and `Muon` do. `refuse_reason` knows the ones that look at a whole matrix, a parameter's norm or all
parameters at once. The fused step, which unscales and skips by itself, is in `fused.py`.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from onecopy.errors import ConfigError
from onecopy.optim.across_shards import AcrossShards
from onecopy.optim.fused import make_fused, supports_fused_scaling
from onecopy.optim.lamb import Lamb
from onecopy.optim.lion import Lion
from onecopy.optim.muon_groups import build_muon

__all__ = ["ELEMENTWISE", "build_optimizer", "make_fused", "refuse_reason", "supports_fused_scaling"]

ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Names of the classes of `torch.optim` whose update of an element reads that element only."""

OWN: dict[str, type[torch.optim.Optimizer]] = {"Lion": Lion, "Lamb": Lamb}
"""Classes of this package by the name the configuration gives them; Muon, which sorts its parameters, is the third."""

_ANY_CASE = {
    "adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion", "lamb": "Lamb", "muon": "Muon",
}  # fmt: skip
_MUP = ("muadam", "muadamw", "musgd")
_ADAM_FAMILY = ("Adam", "AdamW")

_NORM = "it scales the update by the norm of each whole parameter, and a rank holds only a part of some parameters"
_MATRIX = "it needs each parameter's whole matrix, and a shard is a flat range without rows and columns"
_GLOBAL = "it estimates one step size from all parameters, and each rank would come to its own"
_ADAMW_INSTEAD = "use AdamW"

# What the name of an optimizer class (or of one of its base classes) says, in lower case: (pattern, why, what instead).
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (r"lamb(?!d)|lans$", _NORM, 'use onecopy.optim.Lamb (optimizer.type "Lamb"), which sums norms over the ranks'),
    (r"lars(?![a-z])|larc(?![a-z])", _NORM, "use SGD with momentum, gradient_clipping and a warmup schedule"),
    (r"novograd|^fromage|^nero$", _NORM, _ADAMW_INSTEAD),
    (r"adafactor", "it factors the second moment over rows and columns of whole matrices", _ADAMW_INSTEAD),
    (r"^sm3|^came$", "it keeps one moment for whole rows and columns of a matrix", _ADAMW_INSTEAD),
    (r"adam_?mini", "it keeps one second moment for each block of a whole matrix", _ADAMW_INSTEAD),
    (r"muon|^dion|^scion", "it orthogonalises each parameter's whole matrix",
     'use onecopy.optim.Muon (optimizer.type "Muon"), which makes matrices whole on their owners'),
    (r"shampoo|soap(?![a-z])|kfac|k_fac|psgd|^kron", _MATRIX, _ADAMW_INSTEAD),
    (r"galore|apollo|^ldadam|^fira", _MATRIX, f"{_ADAMW_INSTEAD}: its moments are already shared out over the ranks"),
    (r"lomo$", "it updates parameters inside backward, before gradients are reduced over the ranks", _ADAMW_INSTEAD),
    (r"dadapt|prodigy|^l?dog$|^dowg|^mechanic", _GLOBAL, f"{_ADAMW_INSTEAD} with a warmup schedule"),
    (r"lbfgs", "it does a line search with several forward passes and dot products over all parameters", "use Adam"),
    (r"sparseadam", "it needs sparse gradients, and gradients are reduced as flat dense buffers", "use Adam"),
    (r"^[agkfe]?sam$|^fsam|^looksam", "it perturbs weights by the norm of all gradients, between two backward passes",
     _ADAMW_INSTEAD),
)  # fmt: skip


def build_optimizer(
    name: str,
    params: Mapping[str, Any] | None,
    parameter_groups: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
) -> torch.optim.Optimizer:
    """The optimizer that `optimizer: {type: name, params: params}` of the configuration means.

    `adam`, `adamw`, `sgd`, `adagrad`, `lion`, `lamb` and `muon` in any case, other elementwise classes of `torch.optim` by
    their exact name. Muon's parameters carry `use_muon` (see `muon_groups.mark_matrices`).
    "Adam" is AdamW (decoupled decay) unless `adam_w_mode` is false. The default weight decay of both is 0, as in
    DeepSpeed, unless `torch_adam` asks for torch's own default. `params` is not changed. Not collective.

    Raises `ConfigError` naming key, value and fix: unknown names and parameters, "auto", wrong types and values.
    """
    class_name = _class_name(name)
    arguments = dict(params or {})
    _refuse_leftovers(arguments)
    if class_name in _ADAM_FAMILY:
        class_name = _adam_arguments(class_name, arguments)
    if class_name in _ANY_CASE.values():
        arguments.pop("foreach", None)  # a hint about speed from older configurations; the engine chooses the step
    if class_name == "Muon":
        return build_muon(arguments, parameter_groups)
    optimizer_class = OWN.get(class_name) or getattr(torch.optim, class_name)
    checked = _checked(class_name, optimizer_class, arguments)
    try:
        optimizer: torch.optim.Optimizer = optimizer_class(parameter_groups, **checked)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {class_name} says: {error}") from error
    return optimizer


def refuse_reason(optimizer: object) -> str | None:
    """Why `optimizer` would be wrong on flat shards, with what to use instead; None when nothing speaks against it.

    Looks at the names of its class and base classes, and at an optimizer that it wraps (`optimizer`,
    `base_optimizer`). An unknown third-party class is taken to be elementwise.
    """
    seen: set[int] = set()
    current: object | None = None if isinstance(optimizer, AcrossShards) else optimizer
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for base in type(current).__mro__:
            reason = _reason_for_name(base.__name__)
            if reason is not None:
                return reason
        current = getattr(current, "optimizer", None) or getattr(current, "base_optimizer", None)
    return None


def _reason_for_name(class_name: str) -> str | None:
    lower = class_name.lower()
    for pattern, why, instead in _REFUSED:
        if re.search(pattern, lower):
            return f"{class_name} cannot step flat shards: {why}; {instead}."
    return None


def _class_name(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f'optimizer.type is {name!r}; write the name of an optimizer, for example "AdamW".')
    if name.lower() in _ANY_CASE:
        return _ANY_CASE[name.lower()]
    if name in ELEMENTWISE:
        return name
    reason = _reason_for_name(name)
    if reason is not None:
        raise ConfigError(f"optimizer.type {name!r}: {reason}")
    if name.lower() in _MUP:
        raise ConfigError(
            f"optimizer.type {name!r} is a class of the package mup; build it from the model's parameters and pass it as "
            "initialize(optimizer=...)."
        )
    every = (*ELEMENTWISE, *OWN, "Muon")
    by_lower = {known.lower(): known for known in every}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[near[0]]!r}? " if near else ""
    raise ConfigError(
        f"optimizer.type {name!r} is unknown: {hint}Known: {', '.join(every)}; any other elementwise optimizer "
        "can be built by you and passed as initialize(optimizer=...)."
    )


def _refuse_leftovers(arguments: dict[str, Any]) -> None:
    if "max_grad_norm" in arguments:
        raise ConfigError(
            f"optimizer.params.max_grad_norm is {arguments['max_grad_norm']!r}, but clipping is not the optimizer's; "
            f'write the top-level key "gradient_clipping": {arguments["max_grad_norm"]} instead.'
        )
    leftovers = [key for key, value in arguments.items() if value == "auto" or _contains_auto(value)]
    if leftovers:
        names = ", ".join(f"optimizer.params.{key}" for key in leftovers)
        raise ConfigError(f'{names}: "auto" was not resolved by the calling trainer; write a number.')


def _contains_auto(value: object) -> bool:
    return isinstance(value, (list, tuple)) and "auto" in [item for item in value if isinstance(item, str)]


def _adam_arguments(class_name: str, arguments: dict[str, Any]) -> str:
    """Takes DeepSpeed's own parameters out of `arguments`; the class that they choose."""
    decoupled = _flag(arguments, "adam_w_mode", True) or class_name == "AdamW"
    torch_defaults = _flag(arguments, "torch_adam", False)
    arguments.pop("set_grad_none", None)
    arguments.pop("adamw_mode", None)
    if not _flag(arguments, "fp32_optimizer_states", True):
        raise ConfigError("optimizer.params.fp32_optimizer_states is false, but moments stay in fp32; remove the key.")
    if not _flag(arguments, "bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction is false, but Adam corrects its bias; remove the key.")
    if not torch_defaults:
        arguments.setdefault("weight_decay", 0.0)  # torch.optim.AdamW alone would decay by 0.01 unasked
    return "AdamW" if decoupled else "Adam"


def _flag(arguments: dict[str, Any], key: str, default: bool) -> bool:
    value = arguments.pop(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"optimizer.params.{key} is {value!r}; write true or false.")
    return value


def _checked(class_name: str, optimizer_class: type, arguments: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(optimizer_class.__init__)  # type: ignore[misc]
    accepted = {key: p.default for key, p in signature.parameters.items() if key not in ("self", "params")}
    accepted.pop("decoupled_weight_decay", None)  # which of Adam and AdamW it is has been settled by the name
    for key in arguments:
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"optimizer.params.{key} is unknown to {class_name}: {hint}Accepted: {', '.join(accepted)}."
            )
    return {key: _checked_value(f"optimizer.params.{key}", value, accepted[key]) for key, value in arguments.items()}


def _checked_value(key: str, value: object, default: object) -> object:
    """`value` in the type of the class's default, so that torch compares numbers with numbers."""
    if isinstance(default, bool) or default is None:
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; write true or false.")
        return value
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(default):
            raise ConfigError(f"{key} is {value!r}; write a list of {len(default)} numbers, such as {list(default)}.")
        return tuple(float(_number(key, item)) for item in value)
    return value if isinstance(value, torch.Tensor) else _number(key, value)


def _number(key: str, value: object) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fix = "write it without quotes" if isinstance(value, str) else "write a number"
        raise ConfigError(f"{key} is {value!r}, a {type(value).__name__}; {fix}.")
    return value
