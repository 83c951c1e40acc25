"""`optimizer.parameter_offload` at stage 3: what programs go through that take the hooks off for a generation, as TRL's trainers do.

with deepspeed.zero.GatheredParameters(model.parameters()):
    remove_hooks(model)  # every hook of parameter_offload
    ...                  # each rank generates to a length of its own
    add_hooks(model)     # parameter_offload._register_deepspeed_module(module)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from onecopy.engine import Engine


class ParameterOffload:
    """The hooks of one engine's module.

    Attributes:
        module: the module they are on.
    """

    backward_hooks: tuple[Any, ...] = ()  # all are among the forward hooks here

    def __init__(self, engine: Engine) -> None:
        self.module = engine.module
        self._runtime = engine.runtime

    @property
    def forward_hooks(self) -> list[Any]:
        return list(self._runtime._handles)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward_hooks":  # "there are none": the program has removed each of them
            self._runtime.detach()
        else:
            super().__setattr__(name, value)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Put the hooks back. Not collective."""
        if not self._runtime.attached:
            self._runtime._attach()


def no_external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """The module's `ds_external_parameters()`: parameters used by other modules need no registration."""
    return iter(())


def complete_hooks(engine: Engine) -> None:
    """Let a stage-3 engine's optimizer and module have them. Not collective."""
    if engine.zero_optimization_stage() == 3 and engine.optimizer is not None:
        engine.optimizer.parameter_offload = ParameterOffload(engine)  # type: ignore[attr-defined]
        object.__setattr__(engine.module, "ds_external_parameters", no_external_parameters)
        for parameter in engine.module.parameters():
            parameter.ds_active_sub_modules = set()  # type: ignore[attr-defined]
