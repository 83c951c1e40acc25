"""Norms of tensors over model-parallel ranks, clipping by them, and looking for numbers that are not finite.

For loops of the user's own; the engine measures and clips in its step.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a parameter is split over model-parallel ranks."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: torch.Tensor) -> bool:
    return not bool(torch.isfinite(x).all())


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The L2 norm of the whole from the L2 norms of its parts."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def get_global_norm_of_tensors(
    input_tensors: Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """The norm of all tensors together, over the mpu's model-parallel ranks if one is given. -1 if it is not finite."""
    assert isinstance(input_tensors, Iterable), f"expected an iterable of tensors, got {type(input_tensors)}"
    return _norm([(tensor, True) for tensor in input_tensors if tensor is not None], norm_type, mpu)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: torch.Tensor | float | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> torch.Tensor | float:
    """Scale tensors down in place to a global norm of `max_norm`; gives the norm they had."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    scale = max_norm / (float(norm) + eps)
    if scale < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(scale)
    return norm


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Scale the gradients of parameters down in place to a global norm of `max_norm`; gives the norm they had.

    With an mpu the norm is over its model-parallel ranks: parameters that are not split count on the first of them.
    """
    chosen = _with_gradient(parameters)
    norm = _norm([(p.grad, _counts(p, mpu)) for p in chosen], norm_type, mpu)
    scale = max_norm / (float(norm) + 1e-6)
    if scale < 1:
        for parameter in chosen:
            parameter.grad.detach().mul_(scale)
    return norm


def get_flattened_grad_norm(
    parameters: Any, norm_type: float = 2, mpu: Any = None, grad_norm_mask: Any = None
) -> float:
    """The norm of the gradients of parameters, as `clip_grad_norm_` takes it. -1 if it is not finite."""
    return float(_norm([(p.grad, _counts(p, mpu)) for p in _with_gradient(parameters)], norm_type, mpu))


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of parameters, over the mpu's model-parallel ranks if one is given. -1 if it is not finite."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return float(_norm([(p.detach(), _counts(p, mpu)) for p in given], norm_type, mpu))


def _with_gradient(parameters: Any) -> list[Any]:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return [parameter for parameter in given if parameter.grad is not None]


def _counts(parameter: Any, mpu: Any) -> bool:
    """Whether this rank's part of a parameter goes into a norm over the model-parallel ranks."""
    return mpu is None or mpu.get_model_parallel_rank() == 0 or is_model_parallel_parameter(parameter)


def _norm(tensors: list[tuple[torch.Tensor, bool]], norm_type: float, mpu: Any) -> torch.Tensor:
    device = tensors[0][0].device if tensors else torch.device("cpu")
    parts = [tensor.detach().float().norm(norm_type) for tensor, counts in tensors if counts]
    is_maximum = norm_type == math.inf
    stacked = torch.stack(parts) if parts else torch.zeros(1, device=device)
    total = stacked.max() if is_maximum else stacked.pow(norm_type).sum()
    if mpu is not None:
        operation = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
        dist.all_reduce(total, op=operation, group=mpu.get_model_parallel_group())
    norm = total if is_maximum else total.pow(1.0 / norm_type)
    return norm if bool(torch.isfinite(norm)) else torch.full_like(norm, -1.0)


class CheckOverflow:
    """Looks for gradients that are not finite, and agrees on the answer with the other ranks."""

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.mpu = mpu
        self.params = [parameter for group in param_groups or [] for parameter in group]
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Whether one of the norms is -1, which stands for a gradient that is not finite. Collective if it reduces."""
        found = -1 in norm_group
        return self._agree(found) if reduce_overflow else found

    def check(self, param_groups: Any = None) -> bool:
        """Whether a gradient of the groups (default: those given at first) is not finite on any rank. Collective."""
        groups = [self.params] if param_groups is None else param_groups
        return self.has_overflow([parameter for group in groups for parameter in group])

    def has_overflow_serial(self, params: Iterable[Any]) -> bool:
        """As `has_overflow`, on this rank alone."""
        return any(p.grad is not None and has_inf_or_nan(p.grad) for p in params)

    def has_overflow(self, params: Iterable[Any], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient is not finite on any rank. Collective."""
        return self._agree(self.has_overflow_serial(params))

    def _agree(self, found: bool) -> bool:
        if not dist.is_initialized():
            return found
        flag = torch.tensor([float(found)])
        if dist.get_backend() == "nccl":
            flag = flag.to(torch.accelerator.current_accelerator())
        group = None if self.mpu is None or self.zero_reduce_scatter else self.mpu.get_model_parallel_group()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())
