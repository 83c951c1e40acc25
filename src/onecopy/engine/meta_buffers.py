"""Buffers of a model built on the meta device: those in the state dictionary wait for a file, the others are computed again.

A buffer that no file holds (a rotary table, a mask) is a function of its module's settings. The module computes it itself:
transformers' models in `_init_weights`, others in `reset_buffers` or `reset_parameters`. Parameters are still on the meta
device then, so what those methods draw for them costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn

from onecopy.errors import ModelError


def materialise_buffers(model: nn.Module) -> list[str]:
    """Give every meta buffer memory on the host, and values where its module computes them. Not collective.

    Returns:
        The names of persistent buffers that have no values yet and must come from a file.

    Raises:
        ModelError: a buffer outside the state dictionary has no values and its module offers no way to compute them.
    """
    waiting: list[str] = []
    for prefix, module, initialiser in _owners(model, "", None):
        blank = _materialise(module)
        if not blank:
            continue
        _compute(module, blank, initialiser)
        for local in blank:
            name = f"{prefix}.{local}" if prefix else local
            buffer = module._buffers[local]
            assert buffer is not None
            if buffer.is_meta:  # the module assigned a new one, on the device its parameters are on
                raise ModelError(_unknown(name, module))
            if not _is_blank(buffer):
                continue
            if local in module._non_persistent_buffers_set:
                raise ModelError(_unknown(name, module))
            waiting.append(name)
    return waiting


def _owners(
    module: nn.Module, prefix: str, initialiser: Callable[[nn.Module], None] | None
) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None] | None]]:
    """Every module with its name and the `_init_weights` of the innermost model around it."""
    own = getattr(module, "_init_weights", None)
    if callable(own) and len(inspect.signature(own).parameters) == 1:
        initialiser = own
    yield prefix, module, initialiser
    for name, child in module.named_children():
        yield from _owners(child, f"{prefix}.{name}" if prefix else name, initialiser)


def _materialise(module: nn.Module) -> list[str]:
    """The names of the module's own meta buffers, which now have memory and poison in it."""
    blank = []
    for local, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[local] = _poisoned(buffer)
            blank.append(local)
    return blank


def _poisoned(buffer: torch.Tensor) -> torch.Tensor:
    real = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    if real.is_floating_point() or real.is_complex():
        return real.fill_(float("nan"))
    return real.fill_(True if real.dtype == torch.bool else torch.iinfo(real.dtype).max)


def _is_blank(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point() or buffer.is_complex():
        return buffer.numel() > 0 and bool(buffer.isnan().all())
    return buffer.numel() > 0 and torch.equal(buffer, _poisoned(buffer))


def _compute(module: nn.Module, blank: list[str], initialiser: Callable[[nn.Module], None] | None) -> None:
    """Ask the module, then the model around it, for the buffers' values, until there are some in all of them.

    A method may be there without knowing of them: a scaled embedding has inherited the plain one's `reset_parameters`.
    """
    own = [method for name in ("reset_buffers", "reset_parameters") if callable(method := getattr(module, name, None))]
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for method in own:
            if _any_blank(module, blank):
                method()
        if initialiser is not None and _any_blank(module, blank):
            initialiser(module)


def _any_blank(module: nn.Module, names: list[str]) -> bool:
    return any(
        (buffer := module._buffers[name]) is not None and not buffer.is_meta and _is_blank(buffer) for name in names
    )


def _unknown(name: str, module: nn.Module) -> str:
    return (
        f"buffer '{name}' was built on the meta device, is not part of the state dictionary, and {type(module).__name__} has "
        "no reset_buffers(), reset_parameters() or _init_weights that computes it; build that module outside the meta "
        "device, or give it such a method"
    )
