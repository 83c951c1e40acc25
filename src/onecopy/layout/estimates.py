"""Closed formulas of training state in bytes, by DeepSpeed's names for what goes in; offload is for comparison only.

They differ by what one parameter costs over all ranks where state is sharded: DeepSpeed holds 18 bytes (gradients in 16
and in 32 bits, fp32 master, two moments), onecopy 16 (no 16-bit gradients beside the fp32 sums). Activations, slots and
buckets are not in these formulas; `onecopy plan` counts them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LOW = 2  # bytes of a 16-bit parameter
_GIB = 2**30


@dataclass(frozen=True)
class Estimators:
    """DeepSpeed's six estimators, by their names and arguments, for an engine that holds `sharded` bytes a parameter."""

    sharded: int

    def estimate_zero2_model_states_mem_needs(
        self,
        total_params: int,
        num_gpus_per_node: int = 1,
        num_nodes: int = 1,
        cpu_offload: bool = True,
        additional_buffer_factor: float = 1.5,
    ) -> tuple[int, int]:
        """(bytes of host memory a node, bytes a GPU) at stage 2 for `total_params` elements."""
        ranks = num_nodes * num_gpus_per_node
        if cpu_offload:
            return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), _LOW * total_params
        host = int(total_params * 4 * num_gpus_per_node * additional_buffer_factor)
        return host, _LOW * total_params + int(self.sharded * total_params / ranks)

    def estimate_zero3_model_states_mem_needs(
        self,
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
        ranks = num_nodes * num_gpus_per_node
        largest = 4 * largest_layer_params
        if not cpu_offload:
            host = (largest if zero_init else 4 * total_params) * num_gpus_per_node * additional_buffer_factor
            return int(host), largest + int(self.sharded * total_params / ranks), largest
        on_host = _OFFLOADED if cpu_offload_params else _OFFLOADED - _LOW
        gpu = largest if cpu_offload_params else largest + int(_LOW * total_params / ranks)
        each = on_host / num_nodes if zero_init else max(4 * num_gpus_per_node, on_host / num_nodes)
        return int(total_params * each * additional_buffer_factor), gpu, largest

    def estimate_zero2_model_states_mem_needs_all_live(
        self, model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
    ) -> None:
        """Print every choice at stage 2 for a module, a line each."""
        total, _ = _total_and_largest(model)
        self.estimate_zero2_model_states_mem_needs_all_cold(
            total, num_gpus_per_node, num_nodes, additional_buffer_factor
        )

    def estimate_zero2_model_states_mem_needs_all_cold(
        self, total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
    ) -> None:
        """Print every choice at stage 2 for a number of elements, a line each."""
        print(_head(2, total_params, num_gpus_per_node, num_nodes))
        for offload in (True, False):
            host, gpu = self.estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
            )
            print(_row(host, gpu, f"offload_optimizer={_place(offload)}"))

    def estimate_zero3_model_states_mem_needs_all_live(
        self, model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
    ) -> None:
        """Print every choice at stage 3 for a module, a line each."""
        total, largest = _total_and_largest(model)
        self.estimate_zero3_model_states_mem_needs_all_cold(
            total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
        )

    def estimate_zero3_model_states_mem_needs_all_cold(
        self,
        total_params: int,
        largest_layer_params: int,
        num_gpus_per_node: int = 1,
        num_nodes: int = 1,
        additional_buffer_factor: float = 1.5,
    ) -> None:
        """Print every choice at stage 3 for sizes in elements, a line each."""
        print(_head(3, total_params, num_gpus_per_node, num_nodes))
        for optimizer, parameters, zero_init in _choices():
            host, gpu, _ = self.estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, parameters, zero_init,
                additional_buffer_factor,
            )  # fmt: skip
            places = f"offload_param={_place(parameters)}, offload_optimizer={_place(optimizer)}"
            print(_row(host, gpu, f"{places}, zero_init={int(zero_init)}"))


_OFFLOADED = 18  # bytes a parameter takes on the host, as DeepSpeed's formula has it
DEEPSPEED, ONECOPY = Estimators(18), Estimators(16)


def _total_and_largest(model: Any) -> tuple[int, int]:
    """Elements of a module's parameters (as they were before sharding), and of its largest module's own ones."""

    def numel(parameter: Any) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    total = sum(numel(parameter) for parameter in model.parameters())
    largest = max((sum(numel(p) for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return total, largest


def _choices() -> Iterator[tuple[bool, bool, bool]]:
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        yield optimizer, parameters, True
        yield optimizer, parameters, False


def _place(offloaded: bool) -> str:
    return "cpu" if offloaded else "none"


def _row(host: int, gpu: int, options: str) -> str:
    return f"{host / _GIB:9.2f} GiB | {gpu / _GIB:9.2f} GiB | {options}"


def _head(stage: int, total: int, gpus: int, nodes: int) -> str:
    return (
        f"Training state at stage {stage}: {total / 1e6:.0f} million parameters on {nodes} node(s) of {gpus} GPU(s). "
        "Offload is listed for comparison; onecopy keeps all state on GPUs.\n  CPU a node  |  GPU (each)  | options"
    )
