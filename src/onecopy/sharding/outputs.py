"""Find the tensors in what a module returned, hook them, and keep them apart from slots' memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onecopy.sharding.slots import SlotPool

Hook = Callable[[torch.Tensor], torch.Tensor | None]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `function` applied to every tensor in it; dataclasses are changed in place, so their type stays."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_registered(value):
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            mapped = map_tensors(inner, function)
            if mapped is not inner:
                object.__setattr__(value, item.name, mapped)
        return value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    mapped_leaves = [map_tensors(leaf, function) for leaf in leaves]
    if all(a is b for a, b in zip(leaves, mapped_leaves, strict=True)):
        return value
    return pytree.tree_unflatten(mapped_leaves, spec)


def _is_registered(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES


def hook_outputs(output: Any, hook: Hook) -> Any:
    """Call `hook` with the gradient of each output tensor, before the backward that made the output runs."""

    def register(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(hook)
        return tensor

    return map_tensors(output, register)


def separate_from(output: Any, slots: SlotPool) -> Any:
    """Copy output tensors that are a parameter or a view of one: they would change under the caller's feet."""
    memories = {slot.memory.untyped_storage()._cdata for slot in slots.slots}  # not data_ptr: it is 0 without real memory

    def copy_if_inside(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memories:
            return tensor.clone()
        return tensor

    return map_tensors(output, copy_if_inside)
