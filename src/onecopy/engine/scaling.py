"""The fp16 loss scale at the borders of a model: every gradient inside carries its engine's scale, whoever ran backward."""

from typing import Any, ClassVar

import torch

from onecopy.optim.loss_scale import LossScaler


class ScaledGradients:
    """Mixed into the engine, which sets `scaler`.

    `engine.backward` multiplies the loss. A plain `loss.backward()`, or a loss that two engines share, does not carry
    this model's scale: its outputs' gradients are multiplied on the way in, its inputs' divided on the way out.

    Attributes:
        _scale_of_loss: what the loss of the backward under way was multiplied by, whoever's it is.
        _scales_exist: an fp16 engine was made in this process, so inputs must be looked at.
    """

    scaler: LossScaler | None
    _loss_is_scaled: bool
    _scale_of_loss: ClassVar[float] = 1.0
    _scales_exist: ClassVar[bool] = False

    def scale(self, loss: torch.Tensor, mark: bool = True) -> torch.Tensor:
        """The loss times the fp16 loss scale, for code that calls `.backward()` itself."""
        if mark:
            assert loss.numel() == 1 and loss.grad_fn is not None, (
                "engine.scale needs a scalar loss with a grad_fn; for other tensors use tensor.backward(gradient)"
            )
            self._loss_is_scaled = True
        return loss if self.scaler is None else loss * self.scaler.scale

    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    def _missing_scale(self) -> float:
        """What gradients inside this model must be multiplied by to carry its own loss scale."""
        return 1.0 if self._loss_is_scaled else self.loss_scale() / ScaledGradients._scale_of_loss

    def _scale_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        factor = self._missing_scale()
        return None if factor == 1.0 else gradient * factor

    def _unscale_input_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        factor = self._missing_scale()
        return None if factor == 1.0 else gradient / factor

    def _hook_input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        inside = value.view_as(value)  # a hook on the tensor itself would outlive this forward
        inside.register_hook(self._unscale_input_gradient)  # type: ignore[no-untyped-call]
        return inside
