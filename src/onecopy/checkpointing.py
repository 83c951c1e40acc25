"""`onecopy.checkpointing`: activation checkpointing with DeepSpeed's names; the JSON block takes effect by itself."""

from typing import Any

from onecopy.activations import checkpoint, configure, is_configured, reset
from onecopy.activations.random_states import TRACKER, CudaRNGStatesTracker, reseed_model_parallel, seed_model_parallel
from onecopy.activations.settings import current, partition_activations_in_checkpoint, set_num_layers

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


def non_reentrant_checkpoint(function: Any, *args: Any) -> Any:
    """The same as `checkpoint`, which is non-reentrant too."""
    return checkpoint(function, *args)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Named random states of the device (of the CPU, where there is no accelerator); recomputation repeats them."""
    return TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device alike on all model-parallel ranks, and the state that `get_cuda_rng_tracker().fork()` draws from apart.

    The ranks are those of the `mpu` given to `initialize` or `configure`; without one this is rank 0.
    """
    ranks = current().ranks
    seed_model_parallel(seed, ranks.rank if ranks is not None else 0)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed anew what `get_cuda_rng_tracker().fork()` draws from; the device's own state stays."""
    ranks = current().ranks
    reseed_model_parallel(seed, ranks.rank if ranks is not None else 0)
