"""Operators as an accelerator has them, while fake tensors say they are on the CPU: where the two keep other bytes for the backward.

operator            on the CPU                                  on an accelerator (torch/aten)
dropout             noise as wide as the input                  a mask of one byte an element (`native_dropout`)
attention, values   all scores and probabilities, where values  none of them: the memory-efficient kernel takes such
                    have fewer columns than keys (MLA)          values
attention, dropout  all scores, probabilities and their noise   none of them: flash and memory-efficient kernels draw again
rms_norm            its steps one by one, in fp32               the input and one fp32 number a row (`_fused_rms_norm`)
cpu_checkpointing   inputs of blocks are on the host already    they go there, and come back as copies of their own
selective scan      a Python loop over tokens (transformers)    one kernel, its inputs and results (mamba-ssm's `selective_scan_fn`)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
        ExitStack() as stack,
    ):
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models.") and "mamba_selective_scan" in vars(module):
                stack.enter_context(mock.patch.object(module, "mamba_selective_scan", _selective_scan))
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
    width = value.shape[-1]
    if width < query.shape[-1]:  # views, so that what is kept is the whole of both
        query, key = query[..., :width], key[..., :width]
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


class _SelectiveScan(torch.autograd.Function):
    """Passes over memory and results of the kernel: it keeps what it was given, what it returns before the gate, and a state a chunk."""

    @staticmethod
    def forward(
        context: Any,
        u: Tensor,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        z: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        batch, width, length = u.shape
        chunks = u.new_empty(batch, width, -(-length // 2048), 2 * a.shape[-1], dtype=torch.float32)
        out = torch.add(u, delta)
        context.save_for_backward(u, delta, a, b, c, d, z, bias, chunks, out)
        state = chunks[:, :, -1, a.shape[-1] :].to(u.dtype)
        return (out if z is None else torch.mul(out, z)), state

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        _, delta, a, b, c, d, z, bias, _, out = context.saved_tensors
        of_u = torch.add(gradient, out)
        like = [None if one is None else torch.empty_like(one) for one in (a, b, c, d, z, bias)]
        return of_u, torch.add(of_u, delta), *like


def _selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False, **rest: Any,
) -> Any:  # fmt: skip
    out, state = _SelectiveScan.apply(hidden_states, dt, A, B, C, D, z, delta_bias)
    return (out, state) if return_last_state else out


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
