"""LAMB: Adam's direction with a trust ratio for each parameter (You et al., 2019, arXiv:1904.00962), on shards too.

The ratio is a parameter's norm over its direction's norm. On shards both come from every rank's part: the norms of all
parameters travel in one small collective a step, and no rank waits for the host.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from onecopy.comm import Communicator
from onecopy.layout import ALIGNMENT
from onecopy.optim.across_shards import AcrossShards, ParameterSums
from onecopy.optim.lion import check_rates, loss_of
from onecopy.optim.masters import Masters


class Lamb(AcrossShards):
    """DeepSpeed's LAMB: the bias correction scales the step, not the direction, and the ratio is bounded.

        direction u = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay x w
        w -= lr x sqrt(1 - beta2^t) / (1 - beta1^t) x ratio x u,    ratio = |w| / |u| within [min_coeff, max_coeff]

    The ratio is 1 where either norm is zero.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_rates(lr, betas, weight_decay)
        if not eps > 0:
            raise ValueError(f"eps is {eps}; it must be greater than 0")
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"min_coeff is {min_coeff} and max_coeff {max_coeff}; write 0 <= min_coeff <= max_coeff")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._sums: ParameterSums | None = None
        self._coefficients: list[torch.Tensor] = []

    def bind(self, masters: Masters, communicator: Communicator) -> None:
        super().bind(masters, communicator)
        self._sums = ParameterSums(masters, communicator)

    def get_lamb_coeffs(self) -> list[float]:
        """The last step's trust ratios: of each parameter stepped alone, or of all of the engine's. Waits for the device."""
        return torch.cat([c.reshape(-1) for c in self._coefficients]).tolist() if self._coefficients else []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step once on the gradients there are. Collective inside an engine."""
        loss = loss_of(closure)
        self._coefficients = []
        if self.masters is None:
            self._step_parameters()
        else:
            self._step_runs()
        return loss

    def _step_parameters(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction, size = self._direction(parameter, group, torch.empty_like(parameter.grad))
                    weight = torch.linalg.vector_norm(parameter, dtype=torch.float64)
                    ratio = _trust(weight, torch.linalg.vector_norm(direction, dtype=torch.float64), group)
                    parameter.sub_(direction.mul_((ratio * size).to(direction.dtype)))
                    self._coefficients.append(ratio)

    def _step_runs(self) -> None:
        masters, _ = self.bound()
        assert self._sums is not None
        runs = [run for run in masters.runs if run.master.grad is not None]
        weights: list[torch.Tensor] = []
        directions: list[torch.Tensor] = []
        sizes = []
        for run in runs:
            gradient = run.master.grad  # read once, so the direction may lie where it was
            assert gradient is not None
            direction, size = self._direction(run.master, self.param_groups[run.group], gradient)
            weights.append(run.master.detach())
            directions.append(direction)
            sizes.append(size)
        of_weights, of_directions = (total.sqrt() for total in self._sums.of_squares(runs, [weights, directions]))
        for run, direction, size in zip(runs, directions, sizes, strict=True):
            numbers = self._sums.numbers(run)
            ratio = _trust(of_weights[numbers], of_directions[numbers], self.param_groups[run.group])
            direction.view(-1, ALIGNMENT).mul_((ratio * size).to(direction.dtype).unsqueeze(1))
            run.master.sub_(direction)
        self._coefficients = [_trust(of_weights, of_directions, self.param_groups[0])] if runs else []

    def _direction(
        self, parameter: torch.Tensor, group: dict[str, Any], out: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """Move the moments; the direction, written to `out`, and what the learning rate becomes by bias correction."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] = count = int(state["step"]) + 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if group["eps_inside_sqrt"]:
            torch.add(state["exp_avg_sq"], group["eps"], out=out).sqrt_()
        else:
            torch.sqrt(state["exp_avg_sq"], out=out).add_(group["eps"])
        torch.div(state["exp_avg"], out, out=out)
        out.add_(parameter, alpha=group["weight_decay"])
        size = float(group["lr"])
        if group["bias_correction"]:
            size *= (1 - second**count) ** 0.5 / (1 - first**count)
        return out, size


def _trust(weight: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The trust ratio of each parameter from its norm and its direction's, of any one shape."""
    ratio = (weight / direction).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((weight == 0) | (direction == 0), torch.ones_like(ratio), ratio)
