"""Small helpers that scripts take from `deepspeed.runtime.utils`."""

from typing import Any

import torch

from onecopy.observe import format_bytes, note

from ..accelerator import get_accelerator


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


__all__ = ["move_to_device", "see_memory_usage"]
