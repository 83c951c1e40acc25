"""What a file of weights fills on this rank: each tensor of a model or an engine, with the flat pieces that are kept here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.engine import Engine
from onecopy.sharding.early import EarlyShard, early_shard
from onecopy.sharding.early_parameter import EarlyParameter
from onecopy.sharding.pending import replace_tensor


@dataclass
class Target:
    """One tensor of the model.

    Attributes:
        names: all the names it has in the model, the first one first.
        kind: "parameter", "buffer" (in the state dictionary) or "computed" (a buffer outside it).
        pieces: (first element, flat tensor to be filled) for every part that this rank keeps.
        holder: a tensor that is filled whole where it does not lie flat in memory.
    """

    names: list[str]
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    holder: torch.Tensor | None = None

    def fill_whole(self, tensor: torch.Tensor) -> None:
        """Let all of `tensor` be filled."""
        tensor = tensor.detach()
        if tensor.is_contiguous():
            self.pieces.append((0, tensor.view(-1)))
        else:
            self.holder = tensor


def targets_of_engine(engine: Engine) -> list[Target]:
    """Masters and shards of the engine, and what it keeps whole. Not collective."""
    targets = _named(engine.module)
    for unit in engine.units:
        for flat in unit.buffers:
            flat.finish_refresh()
            kept = flat.master if flat.master is not None else flat.shard
            assert kept is not None
            base, stop = (0, flat.numel) if kept.numel() == flat.numel else (flat.own.start, flat.own.stop)
            for parameter, place in zip(flat.parameters, flat.layout.ranges, strict=True):
                target = targets.pop(id(parameter))
                target.shape = place.shape
                part = place.overlap(base, stop)
                if part is not None:
                    local = place.start + part[0] - base
                    target.pieces.append((part[0], kept[local : local + part[1] - part[0]]))
                targets[id(parameter)] = target
    tensors = {id(tensor): tensor for tensor in (*engine.module.parameters(), *engine.module.buffers())}
    managed = {id(parameter) for unit in engine.units for parameter in unit.parameters()}
    for identity, target in targets.items():
        if identity not in managed:
            target.fill_whole(tensors[identity])
    return list(targets.values())


def targets_of_model(model: nn.Module) -> list[Target]:
    """A model's own tensors, and the early shards of those that have left. Parameters on the meta device are left out
    of `pieces`: see `allot`. Not collective.
    """
    targets = _named(model)
    for tensor in (*model.parameters(), *model.buffers()):
        target, early = targets[id(tensor)], early_shard(tensor)
        if early is not None:
            target.shape, target.dtype = early.shape, early.dtype
            target.pieces.append(_own_piece(early))
        elif not tensor.is_meta:
            target.fill_whole(tensor)
    return list(targets.values())


def allot(parameter: nn.Parameter, target: Target, communicator: Communicator) -> None:
    """Give a parameter of the meta device memory for its values: this rank's part, or all of it in a world of one."""
    alone = communicator.world_size == 1
    real = torch.empty(parameter.shape if alone else (0,), dtype=parameter.dtype, device=communicator.device)
    assign(parameter, real)
    if alone:
        target.fill_whole(parameter)
        return
    early = EarlyShard(parameter, target.names[0], communicator, communicator.device, EarlyParameter)
    early.reserve(target.shape, target.dtype)
    early.unbind(parameter)
    target.pieces.append(_own_piece(early))


def assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Let a parameter of the meta device have `value` for its memory."""
    replace_tensor(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))


def _own_piece(early: EarlyShard) -> tuple[int, torch.Tensor]:
    start, stop = early.own()
    return start, early.shard[: stop - start]


def _named(model: nn.Module) -> dict[int, Target]:
    """A target without pieces for every tensor of the model, by identity, in the model's order."""
    targets: dict[int, Target] = {}
    for name, tensor, kind in _tensors(model):
        target = targets.setdefault(id(tensor), Target([], kind, tuple(tensor.shape), tensor.dtype))
        target.names.append(name)
        if kind == "buffer" and target.kind == "computed":
            target.kind = kind
    return targets


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, "parameter"
    for prefix, module in model.named_modules(remove_duplicate=False):
        for local, buffer in module._buffers.items():
            if buffer is not None:
                kind = "computed" if local in module._non_persistent_buffers_set else "buffer"
                yield (f"{prefix}.{local}" if prefix else local), buffer, kind


def all_names(targets: Iterable[Target]) -> set[str]:
    return {name for target in targets for name in target.names}
