"""DeepSpeed's loss scaler classes on onecopy's: alone in a loop of the user's own, or as `engine.optimizer.loss_scaler`."""

from __future__ import annotations

from typing import Any

import torch

from onecopy.optim.loss_scale import LossScaler as Rules

INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"


class LossScalerBase:
    """A loss scale that follows `rules`.

    Attributes:
        dynamic: whether overflows change it.
    """

    raise_error_at_min_scale = True
    scale_factor = 2.0

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.dynamic = rules.dynamic

    @property
    def cur_scale(self) -> float:
        return self.rules.scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.rules._scale = float(value)

    @property
    def loss_scale(self) -> float:
        return self.rules.scale

    @property
    def cur_iter(self) -> int:
        return self.rules._steps

    @property
    def last_overflow_iter(self) -> int:
        return self.rules._last_overflow

    @property
    def cur_hysteresis(self) -> int:
        return self.rules._hysteresis_left

    @property
    def delayed_shift(self) -> int:
        return self.rules.hysteresis

    @property
    def scale_window(self) -> int:
        return self.rules.window

    @property
    def min_scale(self) -> float:
        return self.rules.minimum

    @property
    def consecutive_hysteresis(self) -> bool:
        return self.rules.consecutive_hysteresis

    def update_scale(self, overflow: bool) -> None:
        """Take note of one step; an error where the scale would have to drop below its minimum."""
        if overflow and not self.raise_error_at_min_scale and self.cur_scale <= self.min_scale:
            return
        self.rules.update(bool(overflow))

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        return tuple(self.cur_scale * gradient for gradient in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def has_overflow_serial(self, params: Any) -> bool:
        """Whether a gradient of the parameters is not finite."""
        return any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in params)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rules!r})"


class LossScaler(LossScalerBase):
    """A scale that stays."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(Rules(scale, dynamic=False))


class DynamicLossScaler(LossScalerBase):
    """A scale that halves on overflow and doubles after `scale_window` clean steps."""

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(
            Rules(
                init_scale,
                window=scale_window,
                hysteresis=delayed_shift,
                consecutive_hysteresis=consecutive_hysteresis,
                minimum=min_scale,
            )
        )
        self.raise_error_at_min_scale = raise_error_at_min_scale


def CreateLossScaler(
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScalerBase:
    """Dynamic for float16 where asked for, else a scale that stays (1 for other dtypes)."""
    if dtype == torch.float16 and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or _DEFAULTS))
    return LossScaler(static_loss_scale if dtype == torch.float16 else 1.0)


_DEFAULTS: dict[str, Any] = {
    "init_scale": 2.0**16,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}


def scaler_of(rules: Rules | None) -> LossScalerBase:
    """An engine's loss scale under DeepSpeed's names; what is set here holds for the engine."""
    if rules is None:
        return LossScaler(1.0)
    found = LossScalerBase.__new__(DynamicLossScaler if rules.dynamic else LossScaler)
    LossScalerBase.__init__(found, rules)
    return found
