"""DeepSpeed's Lion classes on onecopy's Lion."""

from collections.abc import Iterable
from typing import Any

from onecopy.optim import Lion


class FusedLion(Lion):
    """Lion on any device, with DeepSpeed's arguments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none


class DeepSpeedCPULion(Lion):
    """Lion on any device; the moment has the dtype of the parameters, which inside the engine are fp32 masters."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


__all__ = ["DeepSpeedCPULion", "FusedLion"]
