"""The optimizer of stages 1 and 2, and DeepSpeed's memory estimates for it."""

from torch import nn

from onecopy.integrations.deepspeed.optimizers import DeepSpeedZeroOptimizer
from onecopy.layout import estimates


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of host memory a node, bytes a GPU) at stage 2."""
    return estimates.zero2(
        total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor, estimates.DEEPSPEED
    )


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 for a model."""
    total, _ = estimates.total_and_largest(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 for a number of elements."""
    print(
        estimates.zero2_table(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor, estimates.DEEPSPEED)
    )


__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
