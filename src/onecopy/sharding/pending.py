"""Parameters whose shape is known while their weights are elsewhere: in early shards, or in a file that is not read yet.

`initialize` first gives such parameters their true shapes, as views of one element, so that all its arithmetic on shapes
sees an ordinary model. Each flat buffer then takes the weights of its own parameters, so the model is never whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from onecopy.errors import ModelError
from onecopy.sharding.early import ATTRIBUTE, EarlyShard, early_shard
from onecopy.sharding.early_parameter import settle_all

_SOURCE = "_onecopy_source"
_UNLOADED = "unloaded"


@contextmanager
def shapes_revealed(model: nn.Module) -> Iterator[list[str]]:
    """Inside, the model's parameters have their shapes; gives the names of those without any weights yet. Collective.

    On an error the early shards that nobody took are put back, so that the model can be initialized again.
    """
    settle_all()
    revealed: list[tuple[nn.Parameter, EarlyShard]] = []
    unloaded: list[str] = []
    for name, parameter in model.named_parameters():
        early = early_shard(parameter)
        if early is not None:
            parameter.__class__ = nn.Parameter
            parameter.data = torch.empty((), dtype=early.dtype, device=early.origin).expand(early.shape)
            early.unmark(parameter)
            setattr(parameter, _SOURCE, early)
            revealed.append((parameter, early))
        elif parameter.is_meta:
            leave_meta(name, parameter)
            unloaded.append(name)
        elif getattr(parameter, _SOURCE, None) is _UNLOADED:
            unloaded.append(name)
    try:
        yield unloaded
    except BaseException:
        for parameter, early in revealed:
            if parameter.__dict__.pop(_SOURCE, None) is not None:
                setattr(parameter, ATTRIBUTE, early)
                early.unbind(parameter)
        raise
    for _, early in revealed:
        early.leave()


def leave_meta(name: str, parameter: nn.Parameter) -> None:
    """Let a parameter of the meta device be a view of one real element, the same object as before."""
    placeholder = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    try:
        replace_tensor(parameter, nn.Parameter(placeholder, requires_grad=parameter.requires_grad))
    except RuntimeError as error:
        raise ModelError(
            f"parameter '{name}' is on the meta device and something refers to it in a way that its memory cannot be replaced "
            f"({error}); build optimizers and hooks after onecopy.initialize"
        ) from error
    setattr(parameter, _SOURCE, _UNLOADED)


def replace_tensor(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Let `parameter` be `other` while staying the object it is, with its attributes."""
    attributes = dict(vars(parameter))
    torch.utils.swap_tensors(parameter, other)
    vars(parameter).update(attributes)


def is_pending(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a shape but no weights of its own."""
    return hasattr(parameter, _SOURCE)


def is_unloaded(parameter: torch.Tensor) -> bool:
    """Whether there are no weights at all yet."""
    return getattr(parameter, _SOURCE, None) is _UNLOADED


def take_weights(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's whole weights; pending ones are taken from where they are. Collective for those.

    Weights that nobody has loaded yet are NaN, so that a use nobody foresaw is seen.
    """
    source = parameter.__dict__.pop(_SOURCE, None)
    if source is None:
        return parameter.data
    if source is _UNLOADED:
        return unknown(parameter.shape, parameter.dtype).contiguous()
    value: torch.Tensor = source.whole()
    source.leave()
    return value


def stop_waiting(parameter: nn.Parameter) -> None:
    """The parameter's weights will come into a shard that somebody else keeps: nothing is made for them here."""
    parameter.__dict__.pop(_SOURCE, None)


def unknown(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Weights that are not loaded: NaN, or zeros where the dtype has no NaN."""
    value: torch.Tensor = torch.empty((), dtype=dtype).fill_(float("nan") if dtype.is_floating_point else 0)
    return value.expand(shape)
