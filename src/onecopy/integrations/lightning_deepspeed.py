"""Lightning's own DeepSpeedStrategy on onecopy's `deepspeed`: CPU ranks, and checkpoints at stage 3.

Lightning starts that strategy on CUDA only, and puts the module's `state_dict()` into a checkpoint before it takes it
out again for the engine to save. On CPU ranks the check is left out, and at stage 3 the state is an empty one.
"""

from __future__ import annotations

import functools
from typing import Any

from onecopy.integrations.when_imported import when_imported


def allow_cpu_ranks() -> None:
    """Change the strategies of `lightning`, `pytorch_lightning` and `lightning_fabric` as they are imported. Repeatable."""
    for name in ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed"):
        when_imported(name, _change_trainer)
    for name in ("lightning.fabric.strategies.deepspeed", "lightning_fabric.strategies.deepspeed"):
        when_imported(name, _change_fabric)


def _change_trainer(module: Any) -> None:
    _numbers_of_cpu_ranks(module)
    strategy, above = module.DeepSpeedStrategy, module.DDPStrategy
    if hasattr(strategy, "_onecopy"):
        return
    strategy._onecopy = True
    start, state = strategy.setup_environment, strategy.lightning_module_state_dict

    @functools.wraps(start)
    def setup_environment(self: Any) -> None:
        if self.root_device.type != "cpu":
            start(self)
            return
        super(above, self).setup_environment()
        self.setup_distributed()

    @functools.wraps(state)
    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        return {} if self.zero_stage_3 else state(self)

    strategy.setup_environment = setup_environment
    strategy.lightning_module_state_dict = lightning_module_state_dict


def _change_fabric(module: Any) -> None:
    _numbers_of_cpu_ranks(module)
    strategy, above = module.DeepSpeedStrategy, module.DDPStrategy
    if hasattr(strategy, "_onecopy"):
        return
    strategy._onecopy = True
    start = strategy.setup_environment

    @functools.wraps(start)
    def setup_environment(self: Any) -> None:
        if self.root_device.type != "cpu":
            start(self)
            return
        super(above, self).setup_environment()
        self._setup_distributed()

    strategy.setup_environment = setup_environment


def _numbers_of_cpu_ranks(module: Any) -> None:
    """All CPU ranks are on the device "cpu", which has no number to compare with the rank's."""
    validate = module._validate_device_index_selection
    if hasattr(validate, "_onecopy"):
        return

    def only_numbered(devices: list[Any]) -> None:
        if any(device.type != "cpu" for device in devices):
            validate(devices)

    only_numbered._onecopy = True  # type: ignore[attr-defined]
    module._validate_device_index_selection = only_numbered
