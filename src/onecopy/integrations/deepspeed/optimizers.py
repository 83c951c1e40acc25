"""The optimizer that `initialize` returns, under the names and with the attributes of DeepSpeed's, which differ by stage."""

from __future__ import annotations

from typing import Any

from onecopy.engine import Engine
from onecopy.integrations.deepspeed.loss_scaler import scaler_of
from onecopy.optim.wrapper import ShardedOptimizer

_ENGINE_OF = "_deepspeed_mode"  # on the optimizer: (ZeRO stage, whether parameters are 16-bit)


class _OfMode(type):
    """`isinstance` asks for the stage: onecopy has one class of optimizers, DeepSpeed one a stage."""

    stages: tuple[int, ...]
    low_precision: bool

    def __instancecheck__(cls, instance: Any) -> bool:
        stage, low_precision = getattr(instance, _ENGINE_OF, (None, False))
        return stage in cls.stages and (low_precision or not cls.low_precision)


class ZeROOptimizer(metaclass=_OfMode):
    """Any optimizer of stages 1 to 3."""

    stages: tuple[int, ...] = (1, 2, 3)
    low_precision = False


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """An optimizer of stage 1 or 2."""

    stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """An optimizer of stage 3."""

    stages = (3,)


class FP16_Optimizer(metaclass=_OfMode):
    """An optimizer of stage 0 over 16-bit parameters."""

    stages, low_precision = (0,), True


class NoOptimizer(metaclass=_OfMode):
    """A kind that onecopy never makes."""

    stages, low_precision = (), False


def complete_optimizer(engine: Engine) -> None:
    """Give `engine.optimizer` the attributes that DeepSpeed's have. Not collective."""
    optimizer: ShardedOptimizer | None = engine.optimizer
    if optimizer is None:
        return
    fp16 = engine.configuration.fp16
    attributes = {
        _ENGINE_OF: (engine.zero_optimization_stage(), fp16.enabled or engine.configuration.bf16.enabled),
        "loss_scaler": scaler_of(engine.scaler),
        "dynamic_loss_scale": engine.dynamic_loss_scale(),
        "custom_loss_scaler": False,
        "external_loss_scale": None,
        "clip_grad": engine.gradient_clipping(),
        "dp_process_group": engine.communicator.group,
        "partition_count": engine.dp_world_size,
    }
    for name, value in attributes.items():
        setattr(optimizer, name, value)
