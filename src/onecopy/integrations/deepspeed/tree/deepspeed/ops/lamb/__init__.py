"""DeepSpeed's LAMB class on onecopy's LAMB."""

from collections.abc import Iterable
from typing import Any

from onecopy.integrations.deepspeed.refusal import NotOffered
from onecopy.optim import Lamb


class FusedLamb(Lamb):
    """LAMB on any device, with DeepSpeed's arguments and maths."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLamb does not support the AMSGrad variant.")
        if max_grad_norm:
            raise NotOffered("FusedLamb: max_grad_norm is not offered by onecopy; use gradient_clipping")
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)


__all__ = ["FusedLamb"]
