"""Closed formulas of training state in bytes, by DeepSpeed's names for what goes in; offload is for comparison only.

`sharded` is what one parameter costs over all ranks where state is sharded: DeepSpeed holds 18 bytes (gradients in 16
and in 32 bits, fp32 master, two moments), onecopy 16 (no 16-bit gradients beside the fp32 sums). Activations, slots and
buckets are not in these formulas; `onecopy plan` counts them.
"""

from collections.abc import Iterator
from typing import Any

DEEPSPEED, ONECOPY = 18, 16  # bytes a parameter
_LOW = 2  # bytes of a 16-bit parameter
_GIB = 2**30


def zero2(total: int, gpus: int, nodes: int, cpu_offload: bool, factor: float, sharded: int) -> tuple[int, int]:
    """(bytes of host memory a node, bytes a GPU) at stage 2 for `total` elements."""
    ranks = nodes * gpus
    if cpu_offload:
        return int(total * max(4 * ranks, 16) * factor), _LOW * total
    return int(total * 4 * gpus * factor), _LOW * total + int(sharded * total / ranks)


def zero3(
    total: int,
    largest_layer: int,
    gpus: int,
    nodes: int,
    cpu_offload: bool,
    cpu_offload_params: bool,
    zero_init: bool,
    factor: float,
    sharded: int,
) -> tuple[int, int, int]:
    """(bytes of host memory a node, bytes a GPU, bytes of the largest layer while it is whole) at stage 3."""
    ranks = nodes * gpus
    largest = 4 * largest_layer
    if not cpu_offload:
        host = (largest if zero_init else 4 * total) * gpus * factor
        return int(host), largest + int(sharded * total / ranks), largest
    on_host = DEEPSPEED if cpu_offload_params else DEEPSPEED - _LOW
    gpu = largest if cpu_offload_params else largest + int(_LOW * total / ranks)
    each = on_host / nodes if zero_init else max(4 * gpus, on_host / nodes)
    return int(total * each * factor), gpu, largest


def total_and_largest(model: Any) -> tuple[int, int]:
    """Elements of a module's parameters (as they were before sharding), and of its largest module's own ones."""

    def numel(parameter: Any) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    total = sum(numel(parameter) for parameter in model.parameters())
    largest = max((sum(numel(p) for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return total, largest


def zero2_table(total: int, gpus: int, nodes: int, factor: float, sharded: int) -> str:
    """Every choice at stage 2, a line each."""
    rows = [_head(2, total, gpus, nodes)]
    for offload in (True, False):
        host, gpu = zero2(total, gpus, nodes, offload, factor, sharded)
        rows.append(_row(host, gpu, f"offload_optimizer={_place(offload)}"))
    return "\n".join(rows)


def zero3_table(total: int, largest_layer: int, gpus: int, nodes: int, factor: float, sharded: int) -> str:
    """Every choice at stage 3, a line each."""
    rows = [_head(3, total, gpus, nodes)]
    for optimizer, parameters, zero_init in _choices():
        host, gpu, _ = zero3(total, largest_layer, gpus, nodes, optimizer, parameters, zero_init, factor, sharded)
        places = f"offload_param={_place(parameters)}, offload_optimizer={_place(optimizer)}"
        rows.append(_row(host, gpu, f"{places}, zero_init={int(zero_init)}"))
    return "\n".join(rows)


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
