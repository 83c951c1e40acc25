"""DeepSpeed's estimates of memory for model states, in bytes: its own formulas, for scripts that print them.

They describe DeepSpeed's layout (offload included), not onecopy's; `engine.memory()` tells what a run holds.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_LOW, _FULL = 2, 18  # bytes a parameter in 16 bits; with gradients in 16 and 32 bits, master and two moments


def zero2(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(CPU, GPU) bytes a node and a GPU need at stage 2 for `total_params` elements."""
    ranks = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), _LOW * total_params
    gpu = _LOW * total_params + int(_FULL * total_params / ranks)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), gpu


def zero3(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(CPU, GPU, largest layer) bytes at stage 3."""
    ranks = num_nodes * num_gpus_per_node
    largest = 4 * largest_layer_params
    if not cpu_offload:
        cpu = (largest if zero_init else 4 * total_params) * num_gpus_per_node * additional_buffer_factor
        return int(cpu), largest + int(_FULL * total_params / ranks), largest
    on_host = _FULL if cpu_offload_params else _FULL - _LOW
    gpu = largest if cpu_offload_params else largest + int(_LOW * total_params / ranks)
    each = on_host / num_nodes if zero_init else max(4 * num_gpus_per_node, on_host / num_nodes)
    return int(total_params * each * additional_buffer_factor), gpu, largest


def total_and_largest(model: nn.Module) -> tuple[int, int]:
    """Elements of the model's parameters, and of the largest module's own ones."""

    def numel(parameter: nn.Parameter) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    total = sum(numel(parameter) for parameter in model.parameters())
    largest = max((sum(numel(p) for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return total, largest


def print_zero2(total_params: int, num_gpus_per_node: int, num_nodes: int, factor: float) -> None:
    """The table of stage 2."""
    _head(total_params, None, num_gpus_per_node, num_nodes)
    for offload in (True, False):
        cpu, gpu = zero2(total_params, num_gpus_per_node, num_nodes, offload, factor)
        _row(cpu, gpu, offload_optimizer="cpu" if offload else "none")


def print_zero3(total_params: int, largest: int, num_gpus_per_node: int, num_nodes: int, factor: float) -> None:
    """The table of stage 3."""
    _head(total_params, largest, num_gpus_per_node, num_nodes)
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = zero3(
                total_params, largest, num_gpus_per_node, num_nodes, optimizer, params, zero_init, factor
            )
            _row(
                cpu,
                gpu,
                offload_param="cpu" if params else "none",
                offload_optimizer="cpu" if optimizer else "none",
                zero_init=int(zero_init),
            )


def _head(total: int, largest: int | None, gpus: int, nodes: int) -> None:
    layer = "" if largest is None else f", {largest / 1e6:.0f}M largest layer params"
    print(
        f"Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes} node{'s' * (nodes != 1)}, {gpus} GPU{'s' * (gpus != 1)} per node.\n"
        f"SW: Model with {total / 1e6:.0f}M total params{layer}.\n"
        "  per CPU  |  per GPU |   Options"
    )


def _row(cpu: int, gpu: int, **options: Any) -> None:
    shown = ", ".join(f"{name}={value}" for name, value in options.items())
    print(f"{cpu / 2**30:9.2f}GB |{gpu / 2**30:7.2f}GB | {shown}")
