"""Lay saved optimizer state into the live optimizer: by parameter name, each rank reading the ranges of its own runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.pieces import flat_buffers, names_by_group
from onecopy.checkpoint.reader import RangeReader
from onecopy.errors import CheckpointError
from onecopy.observe.log import warn

if TYPE_CHECKING:
    from onecopy.engine import Engine
    from onecopy.optim.masters import Run

_OF_THIS_MACHINE = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})
"""Options that say how a step is computed here, not what it computes."""


def group_problems(engine: Engine, saved: list[dict[str, Any]]) -> list[str]:
    """Why the saved groups' options cannot be given to the live groups: one sentence each. Not collective."""
    found = []
    home = {name: index for index, group in enumerate(saved) for name in group["names"]}
    for index, names in names_by_group(engine).items():
        origins = sorted({home[name] for name in names if name in home})
        options = [_comparable(saved[origin]["options"]) for origin in origins]
        if len({repr(option) for option in options}) > 1:
            some = [next(name for name in names if home.get(name) == origin) for origin in origins]
            found.append(
                f"group {index} of the optimizer holds parameters of groups {origins} of the checkpoint ({', '.join(some)}), "
                f"whose options differ ({_difference(options)})"
            )
    return found


def warn_of_another_kind(engine: Engine, common: dict[str, Any]) -> None:
    """Say that an optimizer of another kind saved the state: the live one may ignore it, or miss a part of its own at its step.

    Optimizers are taken for one kind where the options of one have all of the other's: so Adam's state serves AdamW, and
    options that a newer torch adds divide nothing.
    """
    live = set(getattr(engine.basic_optimizer, "defaults", ())) - _OF_THIS_MACHINE
    saved = set(common.get("optimizer_options") or live) - _OF_THIS_MACHINE
    name, saved_name = type(engine.basic_optimizer).__name__, common["optimizer_class"]
    if name != saved_name and not (saved <= live or live <= saved):
        warn(
            f"the optimizer's state was saved by {saved_name} (options {', '.join(sorted(saved - live))}) and is loaded into {name} "
            f"({', '.join(sorted(live - saved))}), which may ignore it or fail at its step; load_optimizer_states=False leaves it out"
        )


def _comparable(options: dict[str, Any]) -> dict[str, Any]:
    return {
        k: (v.item() if isinstance(v, torch.Tensor) else v)
        for k, v in sorted(options.items())
        if k not in _OF_THIS_MACHINE
    }


def _difference(options: list[dict[str, Any]]) -> str:
    first, other = options[0], next(option for option in options[1:] if option != options[0])
    return ", ".join(
        f"{k}: {first.get(k)} and {other.get(k)}" for k in sorted({*first, *other}) if first.get(k) != other.get(k)
    )


def restore_groups(engine: Engine, saved: list[dict[str, Any]]) -> None:
    """Give each live group the options of the saved group its parameters were in; the dictionaries stay the same objects."""
    assert engine.basic_optimizer is not None
    home = {name: index for index, group in enumerate(saved) for name in group["names"]}
    names = names_by_group(engine)
    for index, group in enumerate(engine.basic_optimizer.param_groups):
        origin = next((home[name] for name in names.get(index, []) if name in home), index)
        if origin >= len(saved):
            continue
        for key, value in saved[origin]["options"].items():
            if key in _OF_THIS_MACHINE:
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(float(value))
            else:
                group[key] = value.item() if isinstance(value, torch.Tensor) and key == "lr" else value


def restore_states(engine: Engine, reader: RangeReader) -> None:
    """Replace all optimizer state by the checkpoint's, in the memory it has. A parameter without state in it starts without."""
    optimizer = engine.basic_optimizer
    assert optimizer is not None
    keys = reader.manifest.state_keys()
    if not keys and reader.manifest.global_steps:
        warn("the checkpoint holds no optimizer state; the optimizer starts anew")
    here = {
        place.name
        for run in engine.masters.runs
        for place in run.flat.layout.ranges
        if place.overlap(run.start, run.stop)
    }
    numbers = {name: _numbers(reader, states) for name, states in keys.items() if name in here}
    for flat in flat_buffers(engine):
        # Not of one kind either: a parameter without state beside one with. Zeros are not what a first step would make of it.
        kinds = {
            (tuple(sorted(keys.get(name, ()))), repr(sorted(numbers.get(name, {}).items())))
            for name in flat.names
            if name in here
        }
        if flat.trainable and len(kinds) > 1:
            engine.masters.separate(set(flat.names))
    live = {id(run.master) for run in engine.masters.runs}
    for parameter in [parameter for parameter in optimizer.state if id(parameter) not in live]:
        del optimizer.state[parameter]
    for run in engine.masters.runs:
        old = optimizer.state.pop(run.master, {})
        state = _state_of(run, keys, numbers, reader, old, optimizer.param_groups[run.group])
        if not state and not any(place.overlap(run.start, run.stop) for place in run.flat.layout.ranges):
            state = old  # padding alone, of which no checkpoint knows
        if state:
            optimizer.state[run.master] = state


def name_what_waits(engine: Engine, manifest: Manifest) -> None:
    """Say which parameters were trained when it was saved and are frozen here, though the optimizer has them."""
    waiting = [
        name
        for name in engine.thawing.may_follow()
        if name in manifest.model and manifest.model[name].kind == "trained"
    ]
    if waiting:
        some = ", ".join(waiting[:3]) + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
        warn(
            f"the checkpoint trained {some}, frozen here: fp32 weights and optimizer state of what is frozen are not loaded, and "
            "training it starts anew when it is unfrozen; to go on with them, set requires_grad to True before load_checkpoint"
        )


def _numbers(reader: RangeReader, states: dict[str, str]) -> dict[str, Any]:
    """A parameter's states that are one number: tensors as (dtype, shape, value), others as they are."""
    found: dict[str, Any] = {}
    for state, key in states.items():
        if key in reader.manifest.values:
            found[state] = reader.manifest.values[key]
        elif state in reader.manifest.numbers:
            value = reader.whole(key)
            found[state] = (str(value.dtype), tuple(value.shape), value.item())
    return found


def _state_of(
    run: Run,
    keys: dict[str, dict[str, str]],
    numbers: dict[str, dict[str, Any]],
    reader: RangeReader,
    old: dict[str, Any],
    group: dict[str, Any],
) -> dict[str, Any]:
    """A run's state, read into the tensors of its `old` one where they fit: new memory costs as much time as the reading."""
    state: dict[str, Any] = {}
    filled: dict[str, int] = {}  # end of what has been read; what lies between is set to zero
    for place in run.flat.layout.ranges:
        part = place.overlap(run.start, run.stop)
        if part is None or place.name not in keys:
            continue
        low, high = part
        for name, key in keys[place.name].items():
            if name in numbers[place.name]:
                state[name] = _number(numbers[place.name][name], reader, name, key, run, group)
                continue
            if reader.entry(key).shape != place.shape:
                raise CheckpointError(
                    f"'{key}' has shape {list(reader.entry(key).shape)} and the parameter {list(place.shape)}"
                )
            if name not in state:
                state[name] = _room(run, old.get(name), _dtype_of_state(reader, key, place.name, run))
            offset = place.start + low - run.start
            state[name][filled.get(name, 0) : offset] = 0
            filled[name] = offset + high - low
            reader.read(key, low, state[name][offset : filled[name]])
    for name, end in filled.items():
        state[name][end:] = 0
    return state


def _dtype_of_state(reader: RangeReader, key: str, name: str, run: Run) -> torch.dtype:
    """What the optimizer keeps it in: the master's dtype, also where that was another when it was saved, or one of its own."""
    saved = reader.entry(key).dtype
    master = reader.manifest.tensors.get(f"model.{name}")
    return run.master.dtype if master is not None and saved == master.dtype else saved


def _room(run: Run, old: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element for each of the run's: the old one, if it is such a one."""
    master = run.master.detach()
    wanted = (master.shape, dtype, master.device)
    fits = isinstance(old, torch.Tensor) and old.is_contiguous() and (old.shape, old.dtype, old.device) == wanted
    return old.detach() if fits else torch.empty_like(master, dtype=dtype)


def _number(saved: Any, reader: RangeReader, name: str, key: str, run: Run, group: dict[str, Any]) -> Any:
    """One number as the optimizer wants it: on the master's device, but for a step count that its step reads on the host."""
    if key in reader.manifest.values:
        return saved
    on_host = name == "step" and not (group.get("fused") or group.get("capturable"))
    return reader.whole(key).to("cpu" if on_host else run.master.device)
