"""Who shards a module, and giving an engine up without losing the weights: the module gets them back whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.engine.access import safe_get_full_fp32_param
from onecopy.sharding.parameter import unguard

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

_NAME = "_onecopy_engine"


class _Holder:
    """An engine kept with its module, and only with this one: copies and pickles of the module have none."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Holder, ()


def remember(engine: Engine) -> None:
    """Let `engine_of` find the engine by its module, for as long as the module lives."""
    object.__setattr__(engine.module, _NAME, _Holder(engine))  # not as a submodule


def engine_of(module: nn.Module) -> Engine | None:
    """The living engine that was remembered for `module`, if there is one. Not collective."""
    engine = getattr(module.__dict__.get(_NAME), "engine", None)
    return None if engine is None or engine._destroyed else engine


@torch.no_grad()
def give_up(engine: Engine) -> None:
    """Destroy the engine and let its parameters be whole tensors of their own. Collective.

    Trained parameters come from their masters, so nothing is rounded to the compute dtype; frozen ones keep the dtype
    they are used in. Memory: the whole model on every rank.
    """
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    for unit in engine.units:
        unit.finish_refresh()
        for flat in unit.buffers:
            for parameter in flat.parameters:
                whole = safe_get_full_fp32_param(parameter)
                assert whole is not None
                kept.append((parameter, whole if flat.trainable else whole.to(flat.dtype)))
    engine.destroy()
    engine.module.__dict__.pop(_NAME, None)
    for parameter, whole in kept:
        unguard(parameter)
        parameter.data = whole
        vars(parameter).pop("_onecopy", None)
