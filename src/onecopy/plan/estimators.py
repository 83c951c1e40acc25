"""The estimators people know from DeepSpeed, by the same names and arguments, answered for this engine.

Closed formulas of the training state alone (bytes): parameters and gradients in 16 bits, fp32 masters and two moments.
They know nothing of activations, which `onecopy plan` counts.
"""

from __future__ import annotations

from torch import nn

from onecopy.plan.unseen import GIB

_MASTERS_AND_MOMENTS = 12
_SHARD_SUM = 4  # the fp32 sums of gradients that the step reads


def _largest_layer(model: nn.Module) -> int:
    """Elements of the largest module that holds parameters itself."""
    return max((sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()), default=0)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(CPU bytes, GPU bytes) of the training state at stage 2; without offload the CPU only builds the model."""
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(total_params * max(4 * num_gpus_per_node, 16) * additional_buffer_factor), 2 * total_params
    gpu = 2 * total_params + (_MASTERS_AND_MOMENTS + _SHARD_SUM) * total_params // ranks
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), gpu


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
    """(CPU bytes, GPU bytes, bytes of the largest layer's slots) of the training state at stage 3."""
    ranks = num_gpus_per_node * num_nodes
    largest = 4 * largest_layer_params  # a parameter slot and a gradient slot, 16 bits each
    if cpu_offload:
        gpu = largest if cpu_offload_params else largest + 2 * total_params // ranks
        return (
            int(total_params * (18 if cpu_offload_params else 16) // num_nodes * additional_buffer_factor),
            gpu,
            largest,
        )
    gpu = largest + (_MASTERS_AND_MOMENTS + _SHARD_SUM) * total_params // ranks
    host = largest_layer_params * 4 * num_gpus_per_node if zero_init else total_params * 4 * num_gpus_per_node
    return int(host * additional_buffer_factor), gpu, largest


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 for a model that exists."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _elements(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 from a parameter count."""
    print(_head("2", total_params, num_gpus_per_node, num_nodes))
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f"{host / GIB:9.2f} GiB | {gpu / GIB:9.2f} GiB | offload_optimizer={'cpu' if offload else 'none'}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 3 for a model that exists."""
    estimate_zero3_model_states_mem_needs_all_cold(
        _elements(model), _largest_layer(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 from parameter counts."""
    print(_head("3", total_params, num_gpus_per_node, num_nodes))
    for offload, parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                parameters,
                zero_init,
                additional_buffer_factor,
            )
            print(
                f"{host / GIB:9.2f} GiB | {gpu / GIB:9.2f} GiB | offload_param={'cpu' if parameters else 'none'}, "
                f"offload_optimizer={'cpu' if offload else 'none'}, zero_init={int(zero_init)}"
            )


def _elements(model: nn.Module) -> int:
    return sum({id(p): p.numel() for p in model.parameters()}.values())


def _head(stage: str, total: int, gpus: int, nodes: int) -> str:
    return (
        f"Training state at stage {stage}: {total / 1e6:.0f} million parameters on {nodes} node(s) of {gpus} "
        "GPU(s). Offload is listed for comparison; "
        "this engine keeps all state on GPUs.\n  CPU a node  |  GPU (each)  | options"
    )
