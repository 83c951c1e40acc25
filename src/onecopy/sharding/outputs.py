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
        return _map_attributes(value, function)
    mapped_leaves = [map_tensors(leaf, function) for leaf in leaves]
    if all(a is b for a, b in zip(leaves, mapped_leaves, strict=True)):
        return value
    return pytree.tree_unflatten(mapped_leaves, spec)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors that `map_tensors` finds in `value`."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def _map_attributes(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An object of a class unknown to pytree: the tensors that are its own attributes are changed in place."""
    for name, inner in list(getattr(value, "__dict__", {}).items()):
        if isinstance(inner, torch.Tensor):
            setattr(value, name, function(inner))
    return value


def _is_registered(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES


def hook_outputs(output: Any, hook: Hook) -> Any:
    """Call `hook` with the gradient of each output tensor, before the backward that made the output runs."""

    def register(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    return map_tensors(output, register)


def prepare_outputs(output: Any, slots: SlotPool, hook: Hook | None) -> Any:
    """Make what a module returned safe to keep, and call `hook` with each tensor's gradient before its backward runs.

    A tensor that is a parameter or a view of one would change under the caller's feet: it is copied.
    """
    memories = slots.storages

    def separate(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memories:
            tensor = tensor.clone()
        return tensor

    prepared = map_tensors(output, separate) if memories else output
    return prepared if hook is None else hook_outputs(prepared, hook)
