"""From a configuration's Muon block to groups: which parameters are hidden matrices, and what each half is told."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from onecopy.errors import ConfigError
from onecopy.optim.muon import MATRIX_KEYS, OTHER_KEYS, Muon

_NO_MATRIX = ("embed", "lm_head")  # in a parameter's name: DeepSpeed's rule


def mark_matrices(model: nn.Module) -> None:
    """Set `use_muon` on every parameter that has none: true for matrices, but not for embeddings and the head.

    Those are weights of `nn.Embedding`, and parameters with "embed" or "lm_head" in their name, as in DeepSpeed.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "use_muon"):
            named = any(word in name.lower() for word in _NO_MATRIX)
            matrix = parameter.dim() >= 2 and not named and id(parameter) not in embeddings
            parameter.use_muon = matrix  # type: ignore[attr-defined]


def build_muon(params: dict[str, Any], parameters: Iterable[Any]) -> Muon:
    """The optimizer that the JSON's `lr, momentum, weight_decay, muon_lr, adam_lr, betas, eps, adam_w_mode` mean.

    Every group is split by its parameters' `use_muon`; a group's own values win over the JSON's.

    Raises:
        ConfigError: unknown keys and values; a parameter without `use_muon`.
    """
    settings = _checked(params)
    halves = []
    for use_muon, keys, own_rate in ((True, MATRIX_KEYS, "muon_lr"), (False, OTHER_KEYS, "adam_lr")):
        half = {key: settings[key] for key in keys if key in settings}
        if own_rate in settings:
            half["lr"] = settings[own_rate]
        halves.append((use_muon, keys, half))
    groups = []
    for group in _as_groups(parameters):
        own = {key: value for key, value in group.items() if key != "params"}
        for use_muon, keys, half in halves:
            members = [p for p in group["params"] if _uses_muon(p) is use_muon]
            if members:
                other_half = {*MATRIX_KEYS, *OTHER_KEYS} - {*keys}
                given = {key: value for key, value in own.items() if key not in other_half}
                groups.append({**half, **given, "use_muon": use_muon, "params": members})
    try:
        return Muon(groups)
    except ValueError as error:
        raise ConfigError(f"optimizer.params: {error}") from error


def _uses_muon(parameter: torch.Tensor) -> bool:
    if not hasattr(parameter, "use_muon"):
        raise ConfigError(
            f"a parameter of shape {list(parameter.shape)} has no attribute use_muon; set it to True or False, "
            "or give parameters of the model that initialize is given"
        )
    return bool(parameter.use_muon)


def _as_groups(parameters: Iterable[Any]) -> Iterator[dict[str, Any]]:
    loose = []
    for entry in parameters:
        if isinstance(entry, dict):
            members = entry["params"]
            yield {**entry, "params": [members] if isinstance(members, torch.Tensor) else list(members)}
        else:
            loose.append(entry[1] if isinstance(entry, tuple) else entry)
    if loose:
        yield {"params": loose}


def _checked(params: dict[str, Any]) -> dict[str, Any]:
    """The keys that mean something, in the types they must have."""
    settings = dict(params)
    if settings.pop("per_head_muon", False):
        raise ConfigError(
            "optimizer.params.per_head_muon is true, but Muon orthogonalises whole matrices; remove the key."
        )
    method = settings.pop("ns_method", "standard")
    if method not in ("standard", "gram"):
        raise ConfigError(
            f'optimizer.params.ns_method is {method!r}; write "standard" or "gram", which are one to Muon here.'
        )
    known = {**MATRIX_KEYS, **OTHER_KEYS, "muon_lr": 0.0, "adam_lr": 0.0}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"optimizer.params.{key} is unknown to Muon. Accepted: {', '.join(known)}.")
        wanted = known[key]
        if isinstance(wanted, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"optimizer.params.{key} is {value!r}; write true or false.")
        elif isinstance(wanted, tuple):
            if not isinstance(value, list | tuple) or len(value) != 2:
                raise ConfigError(
                    f"optimizer.params.{key} is {value!r}; write a list of 2 numbers, such as [0.9, 0.95]."
                )
            settings[key] = tuple(float(number) for number in value)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"optimizer.params.{key} is {value!r}, a {type(value).__name__}; write a number.")
    return settings
