"""A parameter's local shard as DeepSpeed cuts it: rank r holds the r-th of equal parts, the last one padded with zeros.

onecopy cuts whole units, so that a rank may hold all of one parameter and none of another; these functions gather and cut anew,
which makes them collective. `onecopy.utils` has functions of the same names that do not communicate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onecopy.engine import access


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's equal part [ceil(numel / ranks)] of the master. Collective; stage 3 only."""
    return _part(param, access.safe_get_full_fp32_param(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's equal part of the gradient of the window so far. Collective; stage 3 only."""
    return _part(param, access.safe_get_full_grad(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's equal part of one optimizer state. Collective; stage 3 only."""
    return _part(param, access.safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite this rank's equal part of the master; the live weight follows. Collective; stage 3 only."""
    access.safe_set_full_fp32_param(param, _whole(param, value))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's equal part of the gradient. Collective; stage 3 only."""
    access.safe_set_full_grad(param, _whole(param, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's equal part of one optimizer state. Collective; stage 3 only."""
    access.safe_set_full_optimizer_state(param, _whole(param, value), optim_state_key)


def _length(param: Any) -> int:
    assert hasattr(param, "ds_id"), "local shards exist at ZeRO stage 3 only; use the safe_get_full_* functions"
    return -(-int(param.ds_numel) // dist.get_world_size(param.ds_process_group))


def _part(param: Any, full: torch.Tensor | None) -> torch.Tensor | None:
    length = _length(param)
    if full is None:
        return None
    padded = full.new_zeros(length * dist.get_world_size(param.ds_process_group))
    padded[: full.numel()] = full.reshape(-1)
    start = length * dist.get_rank(param.ds_process_group)
    return padded[start : start + length].clone()


def _whole(param: Any, value: torch.Tensor) -> torch.Tensor:
    length = _length(param)
    if value.numel() != length:
        raise ValueError(
            f"the value has {value.numel()} elements; this rank's part of a parameter of shape {list(param.ds_shape)} has {length}"
        )
    mine = value.detach().reshape(-1).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(param.ds_process_group))]
    dist.all_gather(parts, mine, group=param.ds_process_group)
    return torch.cat(parts)[: param.ds_numel].view(param.ds_shape)
