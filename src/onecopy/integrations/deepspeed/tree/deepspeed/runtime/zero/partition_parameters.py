"""Building models for ZeRO-3, and making their parameters whole for a while."""

from collections.abc import Callable, Iterable
from enum import Enum
from types import TracebackType
from typing import Any

import torch
from torch import nn

from onecopy import zero
from onecopy.observe import log_once
from onecopy.zero import ZeroParamStatus, register_external_parameter, unregister_external_parameter

from ...accelerator import get_accelerator

# transformers replaces this pair while it builds rotary tables, so that they keep their dtype; here they always do.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: tensors are made as the model makes them."""
    return fn


class ZeroParamType(Enum):
    """How a parameter is sharded; only NORMAL occurs."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class GatheredParameters(zero.GatheredParameters):
    """onecopy's, which leaves out what is no tensor: transformers passes None for a layer without bias."""

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else params
        kept = [entry for entry in given if isinstance(entry, torch.Tensor)] if isinstance(given, Iterable) else []
        super().__init__(kept, modifier_rank, fwd_module, enabled)  # type: ignore[arg-type]


class Init:
    """A context to build a model in. The model is built whole on each rank; `initialize` shards it.

    Takes DeepSpeed's arguments. Parameters and helper tensors keep the dtype and device the model gives them.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        if enabled:
            log_once(
                "zero.Init builds whole",
                "zero.Init: the model is built whole in each rank's host memory and sharded by initialize; weights and "
                "buffers keep the dtype the model gives them until then",
            )

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


def shutdown_init_context() -> None:
    """There is nothing to suspend: `Init` changes nothing outside itself."""


restore_init_context = shutdown_init_context

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
