"""Building models for ZeRO-3, and making their parameters whole for a while."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from onecopy import zero
from onecopy.integrations.deepspeed.parameters import ZeroParamType
from onecopy.observe import log_once
from onecopy.sharding.early_parameter import resume_construction as restore_init_context
from onecopy.sharding.early_parameter import suspend_construction as shutdown_init_context
from onecopy.zero import ZeroParamStatus, register_external_parameter, unregister_external_parameter

from ...accelerator import get_accelerator

# transformers replaces this pair while it builds rotary tables, so that they keep their dtype; here they always do.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: tensors are made as the model makes them."""
    return fn


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


class Init(zero.Init):
    """onecopy's, with DeepSpeed's default where neither a dtype nor a configuration is given: parameters become float16.

    Helper tensors and buffers keep their dtype, which DeepSpeed's do not.
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
        if enabled and dtype is None and config_dict_or_path is None and config is None:
            dtype = torch.float16
            log_once(
                "zero.Init casts to half",
                "zero.Init has neither dtype= nor a configuration, so parameters become float16, as in DeepSpeed; give "
                "config_dict_or_path= to keep the dtype the model gives them",
            )
        super().__init__(
            module,
            data_parallel_group=data_parallel_group,
            remote_device=remote_device,
            enabled=enabled,
            dtype=dtype,
            mpu=mpu,
        )


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
