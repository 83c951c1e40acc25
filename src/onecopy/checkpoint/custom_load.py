"""`custom_load_fn(src=state_dict, dst=module)`: the user's function sees whole weights, at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.checkpoint.manifest import dtype_of
from onecopy.checkpoint.pieces import flat_buffers
from onecopy.checkpoint.reader import RangeReader

if TYPE_CHECKING:
    from onecopy.engine import Engine


def whole_state_dict(reader: RangeReader) -> dict[str, torch.Tensor]:
    """The checkpoint's weights and buffers under all their names, in the dtype they are computed in, on the host."""
    found: dict[str, torch.Tensor] = {}
    for name, entry in reader.manifest.model.items():
        if f"model.{name}" in reader.manifest.tensors:
            found[name] = reader.whole(f"model.{name}", dtype_of(entry.dtype))
        elif 0 in entry.shape:
            found[name] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        for alias in entry.aliases:
            found[alias] = found[name]
    return found


def load_whole_weights(
    engine: Engine,
    source: dict[str, torch.Tensor],
    strict: bool = True,
    function: Callable[..., Any] | None = None,
    may_miss: Iterable[str] = (),
) -> None:
    """Load a dictionary of whole weights into the engine's module, as `load_state_dict` or the user's function does.

    Collective. A dictionary that does not fit raises what `load_state_dict` raises.
    """

    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        complete = copy.copy(src)  # with the versions of modules that torch keeps beside the tensors
        own = dst.state_dict() if may_miss else {}
        complete.update({name: own[name] for name in may_miss if name in own})
        dst.load_state_dict(complete, strict=strict)

    engine._clear_window()
    call_custom_load(engine, source, function or load)


@torch.no_grad()
def call_custom_load(engine: Engine, source: dict[str, torch.Tensor], function: Callable[..., Any]) -> None:
    """Gather all weights, let the function change the module, and take the weights back into masters and shards.

    Collective. Needs room for the whole model once on every rank, in fp32 where it is trained.
    """
    for unit in engine.units:
        unit.finish_refresh()
    wholes = []
    for flat in flat_buffers(engine):
        kept = flat.master if flat.master is not None else flat.shard
        assert kept is not None
        whole = torch.zeros(flat.numel, dtype=kept.dtype, device=kept.device)
        whole[flat.own] = flat.owned(kept)
        if engine.communicator.world_size > 1:
            engine.communicator.gather(whole, flat.key, flat.label)
        flat.bind(flat.views(whole))
        wholes.append((flat, kept, whole))
    try:
        function(src=source, dst=engine.module)
    finally:
        for flat, kept, whole in wholes:
            kept.copy_(whole if kept.numel() == whole.numel() else whole[flat.own])
            if flat.whole is not None:
                flat.bind_whole()
            else:
                flat.unbind(torch.empty(0, dtype=flat.dtype, device=kept.device))
        for flat, _, _ in wholes:
            flat.start_refresh()
