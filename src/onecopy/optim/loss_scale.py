"""The loss scale of fp16 training: a number that halves on overflow and doubles after a clean window.

Plain Python on purpose: every rank feeds it the same agreed overflow flag, so every rank holds the same scale.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from onecopy.errors import ConfigError, OneCopyError

_FACTOR = 2.0


class LossScaleError(OneCopyError):
    """Gradients overflow although the loss scale is already at its minimum."""


class Fp16Settings(Protocol):
    """The part of the `fp16` block that `LossScaler.from_config` reads."""

    @property
    def enabled(self) -> bool: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def initial_scale(self) -> float: ...
    @property
    def loss_scale_window(self) -> int: ...
    @property
    def hysteresis(self) -> int: ...
    @property
    def consecutive_hysteresis(self) -> bool: ...
    @property
    def min_loss_scale(self) -> float: ...


class LossScaler:
    """Static or dynamic loss scale with DeepSpeed's rules.

    On overflow a dynamic scaler first uses up `hysteresis - 1` overflows, then halves at each one. After `window` steps
    without overflow it doubles, and again after each further window. Hysteresis is restored when the scale doubles, or
    at every clean step with `consecutive_hysteresis`.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        dynamic: bool = True,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
    ) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"fp16: the loss scale is {scale}; it must be a positive finite number.")
        if dynamic and (window < 1 or hysteresis < 1 or minimum <= 0):
            raise ConfigError(
                f"fp16: loss_scale_window {window}, hysteresis {hysteresis}, min_loss_scale {minimum}: dynamic loss "
                "scaling needs each to be positive."
            )
        if dynamic and scale < minimum:
            raise ConfigError(
                f"fp16: the initial loss scale {scale:g} is below min_loss_scale {minimum:g}; raise "
                "initial_scale_power or lower min_loss_scale."
            )
        self.dynamic = dynamic
        self.window = int(window)
        self.hysteresis = int(hysteresis)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.minimum = float(minimum)
        self._scale = float(scale)
        self._hysteresis_left = int(hysteresis)
        self._steps = 0
        self._last_overflow = -1

    @classmethod
    def from_config(cls, fp16: Fp16Settings) -> LossScaler:
        """The scaler that an `fp16` block means: scale 1 when disabled, dynamic when `loss_scale` is 0."""
        if not fp16.enabled:
            return cls(1.0, dynamic=False)
        if fp16.loss_scale:
            return cls(fp16.loss_scale, dynamic=False)
        return cls(
            fp16.initial_scale,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )

    @property
    def scale(self) -> float:
        """What the loss is multiplied by now; the same on all ranks."""
        return self._scale

    def update(self, overflow: bool, detail: str = "") -> None:
        """Takes note of one optimizer step; `overflow` must be the flag that all ranks agreed on.

        `detail` (which parameters were not finite, say) is put into the error. Raises `LossScaleError` when a dynamic
        scale would have to drop below its minimum; the scaler is unchanged then. A static scale never changes.
        """
        if self.dynamic:
            if overflow:
                self._overflowed(detail)
            else:
                self._was_clean()
        if overflow:
            self._last_overflow = self._steps
        self._steps += 1

    def _overflowed(self, detail: str) -> None:
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
        elif self._scale <= self.minimum:
            raise LossScaleError(self._minimum_message(detail))
        else:
            self._scale = max(self._scale / _FACTOR, self.minimum)

    def _was_clean(self) -> None:
        if self.consecutive_hysteresis:
            self._hysteresis_left = self.hysteresis
        clean = self._steps - self._last_overflow - 1
        if clean > 0 and clean % self.window == 0:
            self._hysteresis_left = self.hysteresis
            self._scale *= _FACTOR

    def _minimum_message(self, detail: str) -> str:
        recent = self._steps - self._last_overflow
        last = "the step before overflowed too" if recent == 1 else f"the last overflow was {recent} steps ago"
        lower = "lower fp16.min_loss_scale to 1; " if self.minimum > 1 else ""
        return (
            f"The loss scale is already at minimum ({self.minimum:g}) and gradients still overflow in fp16, at update "
            f"{self._steps + 1} ({last}).{' ' + detail.strip() if detail else ''} Try, in this order: {lower}"
            '"bf16": {"enabled": true} instead of fp16 (weights pretrained in bf16 often overflow fp16); check that '
            "the loss itself is finite (print it; look for log(0), empty targets, rows that are masked throughout); a "
            "lower learning rate or a longer warmup. Rare overflows are ridden out by a higher fp16.hysteresis or a "
            "shorter fp16.loss_scale_window."
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; restores the sequence of scales exactly."""
        return {
            "dynamic": self.dynamic,
            "scale": self._scale,
            "hysteresis_left": self._hysteresis_left,
            "steps": self._steps,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; between static and dynamic, the configuration of this run wins."""
        if not (self.dynamic and state["dynamic"]):
            return
        self._scale = max(float(state["scale"]), self.minimum)
        self._hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)
        self._steps = int(state["steps"])
        self._last_overflow = int(state["last_overflow"])

    def __repr__(self) -> str:
        kind = f"dynamic, minimum {self.minimum:g}, window {self.window}" if self.dynamic else "static"
        return f"LossScaler({self._scale:g}, {kind})"
