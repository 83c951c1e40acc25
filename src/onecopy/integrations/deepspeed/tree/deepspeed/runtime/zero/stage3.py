"""The optimizer of stage 3, and DeepSpeed's memory estimates for it."""

from torch import nn

from onecopy.integrations.deepspeed import estimates
from onecopy.integrations.deepspeed.estimates import zero3 as estimate_zero3_model_states_mem_needs
from onecopy.optim.wrapper import ShardedOptimizer as DeepSpeedZeroOptimizer_Stage3


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model."""
    total, largest = estimates.total_and_largest(model)
    estimates.print_zero3(total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates for sizes in elements."""
    estimates.print_zero3(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
