"""Leaf modules: marked before `initialize`, a module becomes a unit, gathered and reduced as one."""

from collections.abc import Callable
from typing import Any

from torch import nn

from onecopy.utils import set_z3_leaf_modules


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of the model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this very module, or take its mark off."""
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their names in the model; take their marks off without `flag`."""
    return _mark(model, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules whose names end so; take their marks off without `flag`."""
    return _mark(model, module_name_suffixes, lambda name, wanted: name.endswith(wanted), flag, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of modules of these classes off."""
    found = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def _mark(model: nn.Module, wanted: list[str], fits: Callable[[str, str], bool], flag: bool, strict: bool) -> list[Any]:
    found = [module for name, module in model.named_modules() if any(fits(name, entry) for entry in wanted)]
    if not found and strict:
        raise ValueError(f"the model has no module named {', '.join(wanted)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]
