"""Precision plugins: inputs in the dtype the engine computes in, backward and step by the engine, clipping by the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onecopy.engine import Engine
from onecopy.errors import ModelError
from onecopy.integrations.lightning.packages import fabric_module, trainer_module


def cast(data: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors inside `data` in `dtype`; all else as it is."""
    return torch.utils._pytree.tree_map(
        lambda value: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value, data
    )


def clip_next_step(engine: Engine, value: float, algorithm: str) -> None:
    """Let the engine clip the gradient's norm to `value` in the next `step` below, and in that one only.

    Raises:
        ModelError: values of single elements are to be clipped.
    """
    if algorithm != "norm":
        raise ModelError(
            f'gradients cannot be clipped by {algorithm}: the ranks hold sums of shards; use gradient_clip_algorithm="norm"'
        )
    engine.__dict__.setdefault("_settled", engine.configuration)
    engine.configuration = replace(engine.configuration, gradient_clipping=float(value))


def step(engine: Engine) -> None:
    """Step, and forget what `clip_next_step` asked for. Collective."""
    try:
        engine.step()
    finally:
        engine.configuration = engine.__dict__.pop("_settled", engine.configuration)


class CastsInputs:
    """Comes before Lightning's own plugin among the base classes.

    Attributes:
        precision: Lightning's name, such as "bf16-mixed".
        dtype: what inputs are cast to; None casts nothing.
    """

    def __init__(self, precision: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.precision = precision
        self.dtype = dtype

    def convert_input(self, data: Any) -> Any:
        return data if self.dtype in (None, torch.float32) else cast(data, self.dtype)


class TrainerPrecision(CastsInputs, trainer_module("plugins.precision.precision").Precision):  # type: ignore[misc]
    """What the Trainer asks of a precision plugin, answered by the strategy's engine.

    Attributes:
        engine: set by the strategy once there is one.
    """

    engine: Engine | None = None

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Automatic optimisation takes the mean over the micro-batches of a step; a manual loop their sum, as torch does."""
        assert self.engine is not None
        if model.automatic_optimization:
            # The Trainer has divided by the whole window; the engine divides by the micro-batches there were.
            accumulated = self.engine.gradient_accumulation_steps()
            self.engine.backward(tensor * accumulated if accumulated > 1 else tensor, **kwargs)
        else:
            self.engine.backward(tensor, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        assert self.engine is not None
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise ModelError(
                "training_step returned None, which skips a backward pass that other ranks wait in; "
                "return a loss times 0.0 on the batches to skip, or use manual optimization"
            )
        step(self.engine)
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """The engine clips as it steps. Without a value here the configuration's holds."""
        assert self.engine is not None
        if clip_val:
            clip_next_step(
                self.engine, clip_val, str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            )


class FabricPrecision(CastsInputs, fabric_module("plugins.precision.precision").Precision):  # type: ignore[misc]
    """What Fabric asks of a precision plugin: inputs in the compute dtype, outputs in the default one."""

    def convert_output(self, data: Any) -> Any:
        return data if self.dtype in (None, torch.float32) else cast(data, torch.get_default_dtype())
