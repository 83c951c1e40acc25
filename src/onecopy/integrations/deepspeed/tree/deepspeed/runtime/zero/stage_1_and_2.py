"""The optimizer of stages 1 and 2, and DeepSpeed's memory estimates for it."""

from torch import nn

from onecopy.integrations.deepspeed import estimates
from onecopy.integrations.deepspeed.estimates import zero2 as estimate_zero2_model_states_mem_needs
from onecopy.optim.wrapper import ShardedOptimizer as DeepSpeedZeroOptimizer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model."""
    total, _ = estimates.total_and_largest(model)
    estimates.print_zero2(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a number of elements."""
    estimates.print_zero2(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
