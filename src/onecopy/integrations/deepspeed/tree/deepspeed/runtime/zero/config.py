"""The `zero_optimization` block, resolved, and the names of its stages."""

from enum import IntEnum

from onecopy.config.zero import ZeroConfig as DeepSpeedZeroConfig


class ZeroStageEnum(IntEnum):
    """What is sharded from each stage on."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


__all__ = ["DeepSpeedZeroConfig", "ZeroStageEnum"]
