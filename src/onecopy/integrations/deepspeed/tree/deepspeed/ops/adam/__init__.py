"""DeepSpeed's Adam classes on torch's Adam, alone or inside the engine."""

from collections.abc import Iterable
from typing import Any

import torch

from onecopy.integrations.deepspeed.refusal import NotOffered


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam with decoupled decay (`adamw_mode`), with DeepSpeed's defaults.

    Moments have the dtype of the parameters; inside the engine these are fp32 masters.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("DeepSpeedCPUAdam does not support the AMSGrad variant; use torch.optim.AdamW")
        if not bias_correction:
            raise NotOffered("DeepSpeedCPUAdam: bias_correction=False is not offered by onecopy; leave it out")
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
        )
        self.adam_w_mode = adamw_mode


class FusedAdam(torch.optim.Adam):
    """Adam with decoupled decay (`adam_w_mode`); note the two spellings of DeepSpeed."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant; use torch.optim.AdamW")
        if not bias_correction:
            raise NotOffered("FusedAdam: bias_correction=False is not offered by onecopy; leave it out")
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )
        self.adam_w_mode = adam_w_mode


__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
