"""A rank's pieces of the training state: each a flat range of a named tensor, all of it and nothing twice over the ranks.

Every stage gives the same pieces: a parameter's range belongs to the rank whose shard holds it, also where a stage keeps
the whole on every rank. Frozen weights that every rank holds whole (stages 0-2) are dealt out. Buffers are the first rank's,
all of them: ranks may have their own, and a mean of one rank with a variance of another would be nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from onecopy.checkpoint.manifest import ModelEntry
from onecopy.engine.moving_state import persistent_buffers
from onecopy.errors import CheckpointError

if TYPE_CHECKING:
    from onecopy.engine import Engine
    from onecopy.optim.masters import Run
    from onecopy.sharding import FlatBuffer


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, start + data.numel())` of the tensor `key` of `shape`; `data` is flat and contiguous."""

    key: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor


def flat_buffers(engine: Engine) -> list[FlatBuffer]:
    """All flat buffers of the engine, trained or not, by key: the same order on every rank and in every window."""
    return sorted((flat for unit in engine.units for flat in unit.buffers), key=lambda flat: flat.key)


def plain_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """Parameters outside flat buffers, and persistent buffers: whole on every rank, by their first name."""
    names = engine_names(engine)
    found: dict[str, torch.Tensor] = {n: p for n, p in engine.module.named_parameters() if id(p) not in names}
    seen: set[int] = set()
    for name, buffer in persistent_buffers(engine.module):
        if id(buffer) not in seen:
            seen.add(id(buffer))
            found[name] = buffer
    return found


def engine_names(engine: Engine) -> dict[int, str]:
    """The name of each parameter in a flat buffer by identity: what it was called at `initialize`, wrapped since or not."""
    return {id(p): name for flat in flat_buffers(engine) for p, name in zip(flat.parameters, flat.names, strict=True)}


def in_mid_window(engine: Engine) -> bool:
    """Whether gradients of a window under way lie in the engine: what is saved now is the state of the boundary before it."""
    return engine.runtime.micro_batches > 0 and engine.moving.random is not None


def buffers_to_save(engine: Engine) -> dict[str, torch.Tensor]:
    """This rank's persistent buffers by first name, as they were at the last boundary."""
    kept = engine.moving.buffers if in_mid_window(engine) else {}
    return {name: kept.get(name, buffer) for name, buffer in persistent_buffers(engine.module)}


def model_entries(engine: Engine) -> dict[str, ModelEntry]:
    """The model's parameters and persistent buffers in the model's order, each under its first name. Not collective."""
    entries: dict[str, ModelEntry] = {}
    first: dict[int, str] = {}
    places = {
        name: (flat, place) for flat in flat_buffers(engine) for name, place in zip(flat.names, flat.layout.ranges)
    }
    names = engine_names(engine)
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            entries[first[id(parameter)]].aliases.append(name)
            continue
        first[id(parameter)] = name = names.get(id(parameter), name)
        if name in places:
            flat, place = places[name]
            entries[name] = ModelEntry("trained" if flat.trainable else "frozen", _name(flat.dtype), place.shape)
        else:
            entries[name] = ModelEntry("frozen", _name(parameter.dtype), tuple(parameter.shape))
    for name, buffer in persistent_buffers(engine.module):
        known = first.setdefault(id(buffer), name)
        if known != name:
            entries[known].aliases.append(name)
        else:
            entries[name] = ModelEntry("buffer", _name(buffer.dtype), tuple(buffer.shape))
    return entries


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_pieces(engine: Engine, members: list[int] | None = None) -> Iterator[Piece]:
    """This rank's pieces of weights and buffers: masters where there are any, the weights themselves elsewhere.

    What every rank holds whole is dealt out over `members`: the ranks that share this one's folder, default all. The first
    of them gives the buffers, in the middle of a window as they were when it began.
    """
    members = members or list(range(engine.communicator.world_size))
    for flat in flat_buffers(engine):
        source = flat.master if flat.master is not None else flat.shard
        assert source is not None
        own = flat.owned(source.detach())
        for place, low, high in flat.layout.in_shard(engine.communicator.rank):
            local = place.start + low - flat.own.start
            yield Piece(f"model.{place.name}", place.shape, low, own[local : local + high - low])
    buffers = buffers_to_save(engine)
    frozen = {name: tensor for name, tensor in plain_tensors(engine).items() if name not in buffers}
    seat = members.index(engine.communicator.rank)
    mine = {
        n: frozen[n] for n in dealt_to(seat, len(members), {name: tensor.nbytes for name, tensor in frozen.items()})
    }
    if seat == 0:
        mine |= {name: buffers[name] for name in plain_tensors(engine) if name in buffers}
    for name, tensor in mine.items():
        yield Piece(f"model.{name}", tuple(tensor.shape), 0, tensor.detach().contiguous().reshape(-1))


def dealt_to(place: int, count: int, sizes: dict[str, int]) -> list[str]:
    """Which of the names the rank at `place` of `count` takes care of: bytes even over the ranks, the same deal on every rank."""
    load = [0] * count
    mine = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = load.index(min(load))
        load[least] += size + 1
        if least == place:
            mine.append(name)
    return mine


# ------------------------------------------------------------------------------------------------------- the optimizer
def optimizer_pieces(engine: Engine, everybody: bool = False) -> tuple[list[Piece], dict[str, Any], list[str]]:
    """This rank's pieces of the optimizer's state by parameter name, state that is no tensor, and the names of numbers.

    A state that is one number for a parameter (its step count) is given by the rank that owns the parameter's first element;
    with `everybody` by each rank that owns some, for folders that are not shared.
    """
    pieces: list[Piece] = []
    values: dict[str, Any] = {}
    numbers: set[str] = set()
    if engine.basic_optimizer is None:
        return pieces, values, []
    for flat in flat_buffers(engine):
        if not flat.trainable:
            continue
        for place, low, high in flat.layout.in_shard(engine.communicator.rank):
            for run, start, stop in engine.masters.parts(flat, place.start + low, place.start + high):
                state = engine.basic_optimizer.state.get(run.master, {})
                for key, value in state.items():
                    name = f"optimizer.state.{place.name}.{key}"
                    if is_elementwise(value, run):
                        part = value.detach()[start - run.start : stop - run.start]
                        pieces.append(Piece(name, place.shape, start - place.start, part))
                    elif start == place.start or (everybody and start == place.start + low):
                        numbers.add(key)
                        if isinstance(value, torch.Tensor):
                            number = _one_number(value, key)
                            pieces.append(Piece(name, tuple(number.shape), 0, number.reshape(1)))
                        else:
                            values[name] = value
    return pieces, values, sorted(numbers)


def is_elementwise(value: object, run: Run) -> bool:
    """Whether a state has one element for each of the run's."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 1
        and value.numel() == run.master.numel()
        and value.numel() > 1
    )


def _one_number(value: torch.Tensor, key: str) -> torch.Tensor:
    if value.numel() != 1:
        raise CheckpointError(
            f"the optimizer keeps '{key}' of shape {list(value.shape)}, which is neither one number nor one element a weight; "
            "it cannot be divided among parameters, so it cannot be saved"
        )
    return value.detach()


def optimizer_groups(engine: Engine) -> list[dict[str, Any]]:
    """Each group's options and the names of its parameters."""
    if engine.basic_optimizer is None:
        return []
    names = names_by_group(engine)
    return [
        {
            "names": names.get(index, []),
            "options": {k: _plain(v) for k, v in group.items() if k != "params"},
        }
        for index, group in enumerate(engine.basic_optimizer.param_groups)
    ]


def names_by_group(engine: Engine) -> dict[int, list[str]]:
    """The names of each optimizer group's parameters."""
    found: dict[int, list[str]] = {}
    for flat in flat_buffers(engine):
        for group, start, stop in flat.group_spans:
            found.setdefault(group, []).extend(r.name for r in flat.layout.ranges if start <= r.start < stop)
    return found


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
