"""The model's own parameters, watched: what a program writes into them between steps counts, and none may be exchanged.

edited      `copy_` under `no_grad`, `load_state_dict`, an initialiser: the masters take the new values over
moved       `parameter.data = tensor`: the values go into the engine's memory, where they are trained
cast        `model.half()`, `model.to(device)`: does nothing, as the engine's memory stays what and where it is
exchanged   another `nn.Parameter` under the name: an error, since the engine would go on with the one it has

Sharded weights cannot be edited or moved unseen: a released parameter raises. Named note "edits through `.data`": an
operation in place on `parameter.data` changes no version counter and no address, so it is not seen while masters have a
higher precision than the weights; `GatheredParameters` is the way to edit that always lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.errors import ModelError
from onecopy.observe.log import log_once
from onecopy.sharding import Unit

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

Link = tuple[dict[str, Any], str, object]


class LiveWeights:
    """Compares a model with what its engine was built on; costs a few microseconds a unit."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._links = list(_links(model))

    def look(self, units: list[Unit]) -> None:
        """Take over what has been edited or moved. Not collective: every rank takes its own part of its own weights.

        Raises:
            ModelError: a parameter has been exchanged, or has another shape or no values.
        """
        if any(holder.get(name) is not member for holder, name, member in self._links):
            self._check_exchanged(units)
            self._links = list(_links(self.model))
        for unit in units:
            for flat in unit.whole:
                flat.take_edits()

    def _check_exchanged(self, units: list[Unit]) -> None:
        """Modules may be wrapped, added and taken away, as long as the engine's parameters keep their names or are gone."""
        live = dict(self.model.named_parameters(remove_duplicate=False))
        present = {id(parameter) for parameter in live.values()}
        for unit in units:
            for flat in unit.buffers:
                for parameter, name in zip(flat.parameters, flat.names, strict=True):
                    if id(parameter) not in present and name in live:
                        raise ModelError(
                            f"parameter '{name}' is another object than the one given to initialize, so it would be neither trained nor "
                            "saved; write into the old one (with onecopy.zero.GatheredParameters([parameter], modifier_rank=0): "
                            "parameter.data.copy_(values)), load with engine.load_module_state_dict, or change the model before initialize"
                        )


def _links(model: nn.Module) -> Iterator[Link]:
    """(dictionary of a module, name in it, what is there) for all children and parameters."""
    for module in model.modules():
        for holder in (module._modules, module._parameters):
            for name, member in holder.items():
                yield holder, name, member


class StaysInPlace:
    """A module's `_apply` while an engine holds its weights: `to`, `cpu`, `half` and the like leave it as it is."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self.engine.module
        if self.engine._destroyed:
            vars(module).pop("_apply", None)
            applied: nn.Module = module._apply(function, recurse)
            return applied
        device = self.engine.device
        for unit in self.engine.units:
            for flat in unit.buffers:
                moved = function(torch.empty(0, dtype=flat.dtype, device=device))
                if (moved.dtype, moved.device) != (flat.dtype, device):
                    log_once(
                        ("stays", id(self.engine)),
                        f"the engine keeps the weights on {device} in {flat.dtype}; moving or casting its module does nothing",
                    )
        return module
