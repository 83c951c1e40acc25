"""Activation checkpointing by torch's own non-reentrant checkpoint; storing inputs elsewhere is refused."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from onecopy.config import load
from onecopy.integrations.deepspeed.refusal import NotOffered, refused_function

_configured = False


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accepts what asks for nothing special, with or without a configuration; explicit arguments override it.

    Raises:
        NotOffered: inputs are to be partitioned, laid out contiguously or kept on the CPU, or the time printed.
    """
    global _configured
    asked: dict[str, Any] = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    if deepspeed_config is not None:
        block = load(deepspeed_config).activation_checkpointing
        asked = {key: getattr(block, key) if value is None else value for key, value in asked.items()}
    wanted = [key for key, value in asked.items() if value]
    if wanted:
        raise NotOffered(
            f"activation_checkpointing.{wanted[0]} is not offered by onecopy: inputs of checkpointed functions stay where "
            "they are; set it to false"
        )
    _configured = True


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function, keep only its inputs, and call it again in backward, with random states restored."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def is_configured() -> bool:
    """Whether `configure` was called since the last `reset`."""
    return _configured


def reset() -> None:
    """Forget that `configure` was called."""
    global _configured
    _configured = False


_NO_MODEL_PARALLEL = (
    "random states of model-parallel ranks belong to the library that splits the layers; seed them there"
)
get_cuda_rng_tracker = refused_function("checkpointing.get_cuda_rng_tracker", _NO_MODEL_PARALLEL)
model_parallel_cuda_manual_seed = refused_function("checkpointing.model_parallel_cuda_manual_seed", _NO_MODEL_PARALLEL)
model_parallel_reconfigure_tp_seed = refused_function(
    "checkpointing.model_parallel_reconfigure_tp_seed", _NO_MODEL_PARALLEL
)
set_num_layers = refused_function("checkpointing.set_num_layers", "it sizes contiguous buffers, which are not offered")
partition_activations_in_checkpoint = refused_function(
    "checkpointing.partition_activations_in_checkpoint", "inputs of checkpointed functions stay where they are"
)

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
