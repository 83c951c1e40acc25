"""Operators as an accelerator has them, while fake tensors say they are on the CPU: where the two keep other bytes for the backward.

operator            on the CPU                                  on an accelerator (torch/aten)
dropout             noise as wide as the input                  a mask of one byte an element (`native_dropout`)
attention, dropout  all scores, probabilities and their noise   none of them: flash and memory-efficient kernels draw again
rms_norm            its steps one by one, in fp32               the input and one fp32 number a row (`_fused_rms_norm`)
cpu_checkpointing   inputs of blocks are on the host already    they go there, and come back as copies of their own
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from onecopy.activations.storage import Storage, is_activation

_cpu_dropout, _cpu_attention = F.dropout, F.scaled_dot_product_attention
_put_here, _get_here = Storage.put, Storage.get


@contextmanager
def as_on_accelerator() -> Iterator[None]:
    """Inside, the operators of the table above keep what they keep on an accelerator.

    They are replaced by name: a `TorchFunctionMode` would be off while a backward runs, and so in blocks that compute again.
    """
    with (
        mock.patch.multiple(F, dropout=_dropout, scaled_dot_product_attention=_attention, rms_norm=_rms_norm),
        mock.patch.multiple(Storage, put=_put, get=_get),
    ):
        yield


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0 or inplace:
        return _cpu_dropout(input, p, training, inplace)
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
    return _cpu_attention(query, key, value, attn_mask, 0.0, *rest, **named)


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


class _OnHost(NamedTuple):
    """An input of a checkpointed block that waits in host memory: nothing of it is on the accelerator."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _put(storage: Storage, tensor: Tensor, index: int) -> Any:
    if storage.to_host and is_activation(tensor):
        return _OnHost(tensor.shape, tensor.stride(), tensor.dtype)
    return _put_here(storage, tensor, index)


def _get(storage: Storage, kept: Any) -> Tensor:
    if isinstance(kept, _OnHost):
        return torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype)
    return _get_here(storage, kept)
