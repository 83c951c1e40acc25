"""Small helpers that scripts take from `deepspeed.runtime.utils`."""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch

from onecopy.observe import format_bytes, note

from ..accelerator import get_accelerator
from ..utils.torch import required_torch_version
from .norms import (
    CheckOverflow,
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_flattened_grad_norm,
    get_global_norm,
    get_global_norm_of_tensors,
    get_weight_norm,
    has_inf_or_nan,
    is_model_parallel_parameter,
)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Say on rank 0 what the device's allocator holds now and held at most; nothing without `force`, as in DeepSpeed."""
    if force:
        device = get_accelerator()
        now, most = format_bytes(device.memory_allocated()), format_bytes(device.max_memory_allocated())
        note(f"{message}: {now} allocated, {most} at most on {device.current_device_name()}")


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Tensors inside lists, tuples and dictionaries, moved; with `criterion_func` only those it is true for."""

    def move(value: Any) -> Any:
        is_chosen = isinstance(value, torch.Tensor) and (criterion_func is None or criterion_func(value))
        return value.to(device) if is_chosen else value

    return torch.utils._pytree.tree_map(move, item)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """As `move_to_device`, with copies detached from the graph that require gradients where the tensors do."""

    def copy(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and criterion_func(value)):
            return value
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)

    return torch.utils._pytree.tree_map(copy, item)


class DummyOptim:
    """Parameter groups without an optimizer."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def noop_context() -> Any:
    return nullcontext()


def noop_decorator(func: Any) -> Any:
    return func


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that a file will lie in."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy (if it is imported already or installed) and torch."""
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed)
    torch.manual_seed(seed)


def empty_cache() -> None:
    """Give the device's cached memory back."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def get_ma_status() -> int:
    """Bytes allocated on the device, on rank 0; 0 elsewhere."""
    return (
        0
        if torch.distributed.is_initialized() and torch.distributed.get_rank()
        else get_accelerator().memory_allocated()
    )


def get_tensor_bytes(item: Any) -> int:
    """Bytes of all tensors inside lists, tuples and dictionaries."""
    return sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor))


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The one item that all are equal to; RuntimeError if there are several."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return found.pop()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call: `call_to_str("f", 1, a=2)` is "f(1, a=2)"."""
    words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """The sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The num_parts + 1 borders of parts whose sizes differ by one at most, the larger ones first."""
    small, larger = divmod(num_items, num_parts)
    return [part * small + min(part, larger) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """The num_parts + 1 borders of consecutive parts, the heaviest of which is as light as possible."""
    if len(weights) <= num_parts:
        return [*range(len(weights) + 1), *[len(weights)] * (num_parts - len(weights))]
    sums = [0.0, *accumulate(weights)]
    best = [[float("inf")] * (len(weights) + 1) for _ in range(num_parts + 1)]
    cut = [[0] * (len(weights) + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        for stop in range(part, len(weights) + 1):
            best[part][stop], cut[part][stop] = min(
                (max(best[part - 1][start], sums[stop] - sums[start]), start) for start in range(part - 1, stop)
            )
    borders = [len(weights)]
    for part in range(num_parts, 0, -1):
        borders.append(cut[part][borders[-1]])
    return borders[::-1]


__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "copy_to_device",
    "empty_cache",
    "ensure_directory_exists",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_ma_status",
    "get_only_unique_item",
    "get_tensor_bytes",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_model_parallel_parameter",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "required_torch_version",
    "see_memory_usage",
    "set_random_seed",
]
