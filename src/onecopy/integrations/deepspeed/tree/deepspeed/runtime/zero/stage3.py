"""The optimizer of stage 3, and DeepSpeed's memory estimates for it."""

from torch import nn

from onecopy.integrations.deepspeed.optimizers import DeepSpeedZeroOptimizer_Stage3
from onecopy.layout import estimates


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of host memory a node, bytes a GPU, bytes of the largest layer while it is whole) at stage 3."""
    return estimates.zero3(
        total_params,
        largest_layer_params,
        num_gpus_per_node,
        num_nodes,
        cpu_offload,
        cpu_offload_params,
        zero_init,
        additional_buffer_factor,
        estimates.DEEPSPEED,
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 3 for a model."""
    total, largest = estimates.total_and_largest(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for sizes in elements."""
    print(
        estimates.zero3_table(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            additional_buffer_factor,
            estimates.DEEPSPEED,
        )
    )


__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
