"""Questions about parameters and optimizers under ZeRO."""

from typing import Any

from onecopy.errors import OneCopyError as ZeRORuntimeException
from onecopy.optim.registry import refuse_reason


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter is sharded (at stage 3, or by `zero.Init`)."""
    return hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer is right on shards."""
    return refuse_reason(optimizer) is None


__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]
