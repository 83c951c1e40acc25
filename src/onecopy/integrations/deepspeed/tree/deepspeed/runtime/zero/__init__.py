"""ZeRO's public names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onecopy.init.whole_weights import whole_weights
from onecopy.integrations.deepspeed.refusal import refused_class

from .partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from .tiling import TiledLinear, TiledLinearReturnBias

DeepSpeedTensorOverride = refused_class("zero.DeepSpeedTensorOverride", "tensors are made as the model makes them")
DeepSpeedZeRoOffload = refused_class("zero.DeepSpeedZeRoOffload", "call initialize without an optimizer")


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, every rank holds all weights and may generate alone; gives the model back as it was given. Collective."""
    with whole_weights(model):
        yield model


__all__ = [
    "DeepSpeedTensorOverride",
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
