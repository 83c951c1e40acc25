"""`deepspeed.initialize`: onecopy's, with what callers who treat the module as theirs afterwards need besides.

Lightning moves a module to the CPU when a fit ends, and takes all its hooks off before the next engine is made of it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from onecopy import engine as room
from onecopy.engine import Engine
from onecopy.engine.handover import engine_of, give_up, remember
from onecopy.integrations.deepspeed.configuration import DeepSpeedConfig
from onecopy.integrations.deepspeed.optimizers import complete_optimizer
from onecopy.integrations.deepspeed.parameter_offload import complete_hooks
from onecopy.integrations.deepspeed.parameters import complete_parameters
from onecopy.integrations.deepspeed.recovery import leave_scripts
from onecopy.observe.log import keep_quiet


@functools.wraps(room.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple[Engine, Any, Any, Any]:
    model = kwargs.get("model", args[1] if len(args) > 1 else None)
    before = engine_of(model) if isinstance(model, nn.Module) else None
    if before is not None and _hooks_are_gone(before):
        give_up(before)
    if len(args) < 4 and _nothing_to_train(kwargs):
        kwargs["model_parameters"] = None
    made = room.initialize(*args, **kwargs)
    engine = made[0]
    remember(engine)
    _complete(engine, kwargs)
    if kwargs.get("lr_scheduler") is not None:
        keep_quiet(("scheduler not given", id(engine)))  # who takes it off the engine afterwards saves it, too
    return made


def _complete(engine: Engine, given: dict[str, Any]) -> None:
    """What DeepSpeed's engine, optimizer and parameters have besides."""
    complete_parameters(engine)
    complete_optimizer(engine)
    complete_hooks(engine)
    leave_scripts(engine)
    attributes = {
        "_config": DeepSpeedConfig.of(engine.configuration),
        "mpu": given.get("mpu"),
        "client_optimizer": given.get("optimizer"),
        "client_lr_scheduler": given.get("lr_scheduler"),
        "param_names": {parameter: name for name, parameter in engine.module.named_parameters()},
        "has_moe_layers": False,
        "pipeline_parallelism": False,
        "enable_backward_allreduce": True,
        "losses": None,
    }
    for name, value in attributes.items():
        object.__setattr__(engine, name, value)


def _hooks_are_gone(engine: Engine) -> bool:
    """Whether somebody has put other dictionaries of hooks into the modules, as Lightning does."""
    handles = engine.runtime._handles
    return any(handle.hooks_dict_ref() is None for handle in handles if hasattr(handle, "hooks_dict_ref"))


def _nothing_to_train(options: dict[str, Any]) -> bool:
    """Whether an empty list of parameters and no optimizer ask for an engine without one."""
    config = options.get("config") or options.get("config_params")
    no_optimizer = options.get("optimizer") is None and isinstance(config, dict) and "optimizer" not in config
    return no_optimizer and isinstance(options.get("model_parameters"), list) and not options["model_parameters"]
