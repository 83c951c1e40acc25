"""ZeRO's public names."""

from onecopy.integrations.deepspeed.refusal import refused_class, refused_function

from .partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

_TILED = "a layer's weights are gathered whole; make the layer smaller, or mark its parts as units of their own"
TiledLinear = refused_class("zero.TiledLinear", _TILED)
TiledLinearReturnBias = refused_class("zero.TiledLinearReturnBias", _TILED)
DeepSpeedTensorOverride = refused_class("zero.DeepSpeedTensorOverride", "tensors are made as the model makes them")
DeepSpeedZeRoOffload = refused_class("zero.DeepSpeedZeRoOffload", "call initialize without an optimizer")
unwrap_model_for_generation = refused_function(
    "zero.unwrap_model_for_generation", "call engine.module.generate under zero.GatheredParameters"
)

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
