"""Operators as an accelerator has them, while fake tensors say they are on the CPU: where the two keep other bytes for the backward.

operator            on the CPU                                  on an accelerator (torch/aten)
dropout             noise as wide as the input                  a mask of one byte an element (`native_dropout`)
attention, dropout  all scores, probabilities and their noise   none of them: flash and memory-efficient kernels draw again
rms_norm            its steps one by one, in fp32               the input and one fp32 number a row (`_fused_rms_norm`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AsOnAccelerator(TorchFunctionMode):
    """While it is entered, the operators of the table above keep what they keep on an accelerator."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _STAND_INS.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0 or inplace:
        return F.dropout(input, p, training, inplace)
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **named: Any,
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *rest, **named)


class _RmsNorm(torch.autograd.Function):
    """Passes over memory and results of the fused kernel; values do not matter."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, rows: int) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=tuple(range(rows, x.dim())), keepdim=True, dtype=torch.float32)
        context.save_for_backward(x, weight, scale)
        return torch.empty_like(x).copy_(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight, _ = context.saved_tensors
        of_weight = (
            None if weight is None else gradient.sum(tuple(range(gradient.dim() - weight.dim()))).to(weight.dtype)
        )
        return torch.add(gradient, x), of_weight, None


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    result: Tensor = _RmsNorm.apply(input, weight, input.dim() - len(normalized_shape))
    return result


_STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
}
