"""A parameter whose weights are not here: it raises or fetches when touched, and never computes with garbage.

While its weights are elsewhere (released, or being refreshed) a parameter's class is `GuardedParameter`, whose
`__torch_function__` sees every operation on it first. With the weights in place it is a plain `nn.Parameter` again, so
computing costs nothing.
"""

import sys
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.errors import ModelError, ReleasedParameterError
from onecopy.sharding import messages

if TYPE_CHECKING:
    from onecopy.sharding.runtime import Runtime
    from onecopy.sharding.unit import Unit


class ZeroParamStatus(Enum):
    """Whether a sharded parameter's weights are on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ParameterHome:
    """What a parameter knows of its place: set once as `parameter._onecopy`."""

    __slots__ = ("index", "name", "runtime", "unit")

    def __init__(self, name: str, runtime: "Runtime", unit: "Unit", index: int) -> None:
        self.name = name
        self.runtime = runtime
        self.unit = unit
        self.index = index

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterHome":
        return self

    def __reduce__(self) -> Any:
        raise ModelError(messages.pickled(f"parameter '{self.name}'"))


class GuardedParameter(nn.Parameter):
    """A parameter that tells its runtime before any operation reads it."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_guarded(cls, func, args, kwargs)


def call_guarded(kind: type, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Tell the runtimes of the guarded parameters (of class `kind`) among the arguments, then call."""
    if func not in METADATA:
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, kind):
                home: ParameterHome = value._onecopy  # type: ignore[attr-defined]
                try:
                    home.runtime.touched(home, func)
                except ReleasedParameterError:
                    if func is _T.detach and sys._getframe(2).f_code is nn.Module._save_to_state_dict.__code__:
                        return _entry_of(value)
                    raise
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


class ReleasedEntry(torch.Tensor):
    """What `state_dict()` has for a parameter that is elsewhere: its name, for who needs no more; reading it raises."""

    of: nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def present(entry: ReleasedEntry) -> torch.Tensor:
            if isinstance(entry.of, GuardedParameter):
                home: ParameterHome = entry.of._onecopy  # type: ignore[attr-defined]
                home.runtime.touched(home, func)
            return entry.of.detach()

        if func not in METADATA:
            args, kwargs = torch.utils._pytree.tree_map_only(ReleasedEntry, present, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # debuggers and errors print state dictionaries
        return f"ReleasedEntry({self.of._onecopy.name})"  # type: ignore[attr-defined]


def _entry_of(parameter: Any) -> ReleasedEntry:
    with torch._C.DisableTorchFunctionSubclass():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # the whole one, or loading it would speak of sizes
        entry = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(shape).as_subclass(ReleasedEntry)
    entry.of = parameter
    return entry


# What a parameter's class becomes while it is guarded, and back. Another kind of plain parameter (one without memory,
# say) is entered here by whoever makes it; all others stay whole.
GUARDED: dict[type, type] = {nn.Parameter: GuardedParameter}
UNGUARDED: dict[type, type] = {GuardedParameter: nn.Parameter}


def guard(parameter: nn.Parameter) -> None:
    kind = GUARDED.get(type(parameter))
    if kind is not None:
        parameter.__class__ = kind


def unguard(parameter: nn.Parameter) -> None:
    kind = UNGUARDED.get(type(parameter))
    if kind is not None:
        parameter.__class__ = kind


def refuse_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before `load_state_dict`: raises ReleasedParameterError where a weight of `module` itself is not here."""
    for name, parameter in module._parameters.items():
        if type(parameter) in UNGUARDED and parameter.shape == (0,):  # type: ignore[union-attr]
            given, home = state_dict.get(prefix + name), parameter._onecopy  # type: ignore[union-attr]
            if given is not None and tuple(given.shape) != (0,):
                raise ReleasedParameterError(messages.loading(home.name, home.runtime.communicator.world_size))


_T = torch.Tensor
# Questions about the tensor itself, which need no values; anything else is a read or a write of the weights.
METADATA = {
    *(getattr(_T, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "ndim", "grad_fn", "is_sparse", "is_cuda",
        "is_meta", "is_cpu", "is_quantized", "names", "itemsize", "_version", "is_nested", "is_mkldnn", "is_xpu", "is_mps",
        "_backward_hooks",
        "retains_grad", "output_nr", "is_complex", "is_sparse_csr", "_post_accumulate_grad_hooks",
    ) if hasattr(getattr(_T, name, None), "__get__")),
    *(getattr(_T, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(_T, name) for name in (
        "size", "numel", "dim", "element_size", "is_floating_point", "is_complex", "requires_grad_", "register_hook", "nelement",
        "register_post_accumulate_grad_hook", "stride", "is_contiguous", "storage_offset", "__hash__", "get_device", "type",
        "retain_grad", "is_set_to", "zero_grad",
    ) if hasattr(_T, name)),
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor,
}  # fmt: skip
