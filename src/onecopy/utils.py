"""`onecopy.utils`: read and write training state by parameter, and small helpers around a run."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from onecopy.engine.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

__all__ = [
    "RepeatingLoader",
    "count_parameters",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
]


def count_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """Elements of the model's parameters as they were before sharding. Not collective."""

    def numel(parameter: nn.Parameter) -> int:
        whole: int = getattr(parameter, "ds_numel", parameter.numel())
        return whole

    return sum(numel(p) for p in model.parameters() if p.requires_grad or not trainable_only)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules of these classes as units: fetched and reduced as one. Call it before `initialize`."""
    assert all(isinstance(entry, type | str) for entry in leaf_module_classes), (
        f"leaf_module_classes is {leaf_module_classes}; it must be a list of classes or of their names"
    )
    names = {entry if isinstance(entry, str) else entry.__name__ for entry in leaf_module_classes}
    found = [m for m in model.modules() if {type(m).__name__, f"{type(m).__module__}.{type(m).__qualname__}"} & names]
    if not found and raise_if_not_found:
        raise ValueError(f"the model has no module of class {', '.join(sorted(names))}")
    for module in found:
        module._z3_leaf = True  # type: ignore[assignment]
    return found


class RepeatingLoader:
    """Iterates a loader for ever, starting it again whenever it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
