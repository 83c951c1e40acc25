"""Lion: the sign of an interpolated momentum (Chen et al., 2023, arXiv:2302.06675); elementwise, so right on any shard."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """One moment a weight, `exp_avg`; decay is decoupled. Useful learning rates are 3 to 10 times smaller than AdamW's.

    The defaults are DeepSpeed's (the paper takes betas of 0.9 and 0.99).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        check_rates(lr, betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step once on the gradients there are; parameters without one are left alone."""
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, (inner, outer) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                gradient, average = parameter.grad, state["exp_avg"]
                direction = average.lerp(gradient, 1 - inner).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                average.lerp_(gradient, 1 - outer)
        return loss


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure gives, computed with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_rates(lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Raises ValueError naming the first value that no optimizer can use."""
    if float(lr) < 0:
        raise ValueError(f"lr is {lr}; it must not be negative")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}; write two numbers from 0 up to, but not including, 1")
    if weight_decay < 0:
        raise ValueError(f"weight_decay is {weight_decay}; it must not be negative")
