"""The blocks `tensorboard`, `csv_monitor`, `wandb` and `comet` of a configuration, resolved."""

from typing import Any

from onecopy.config import load
from onecopy.integrations.deepspeed.configuration import monitor_settings


def get_monitor_config(param_dict: dict[str, Any]) -> Any:
    """The monitors' settings of a configuration's dictionary."""
    blocks: dict[str, Any] = {
        name: param_dict[name] for name in ("tensorboard", "csv_monitor", "wandb", "comet") if name in param_dict
    }
    return monitor_settings(load({"train_micro_batch_size_per_gpu": 1, **blocks}, world_size=1))


def DeepSpeedMonitorConfig(**blocks: Any) -> Any:
    """The same from the blocks themselves."""
    return get_monitor_config(blocks)


__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]
