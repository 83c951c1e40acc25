"""Loss scales by their place in DeepSpeed's tree."""

from onecopy.integrations.deepspeed.loss_scaler import (
    CONSECUTIVE_HYSTERESIS,
    DELAYED_SHIFT,
    INITIAL_LOSS_SCALE,
    MIN_LOSS_SCALE,
    SCALE_WINDOW,
    CreateLossScaler,
    DynamicLossScaler,
    LossScaler,
    LossScalerBase,
)

__all__ = [
    "CONSECUTIVE_HYSTERESIS",
    "DELAYED_SHIFT",
    "INITIAL_LOSS_SCALE",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
    "CreateLossScaler",
    "DynamicLossScaler",
    "LossScaler",
    "LossScalerBase",
]
