"""Read and write one parameter's full master, gradient or optimizer state, whatever the stage.

All functions that gather are collective: every rank calls them, in the same order. A parameter is the live one of the
model given to `initialize`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.errors import ModelError
from onecopy.sharding import FlatBuffer, FlatGradient
from onecopy.sharding.parameter import ParameterHome


def _place(parameter: Any) -> tuple[ParameterHome, FlatBuffer] | None:
    """Where an engine keeps the parameter; None for one no engine manages."""
    home: ParameterHome | None = getattr(parameter, "_onecopy", None)
    if home is None:
        return None
    return home, next(flat for flat in home.unit.buffers if any(parameter is member for member in flat.parameters))


def _gathered(communicator: Communicator, flat: FlatBuffer, index: int, local: torch.Tensor) -> torch.Tensor:
    """One parameter whole, from every rank's part of a flat tensor `local` ([n/N], or [n] where every rank has it all)."""
    place = flat.layout.ranges[index]
    if local.numel() == flat.numel and (flat.optimizer_whole or communicator.world_size == 1):
        return local[place.start : place.stop].clone().view(place.shape)
    full = torch.empty(place.numel, dtype=local.dtype, device=local.device)
    for rank in range(communicator.world_size):
        start, stop = flat.layout.shard_bounds(rank)
        part = place.overlap(start, stop)
        if part is None:
            continue
        piece = full[part[0] : part[1]]
        if rank == communicator.rank:
            base = place.start - start
            piece.copy_(local[base + part[0] : base + part[1]])
        communicator.broadcast(piece, rank, place.name)
    return full.view(place.shape)


def _write_local(flat: FlatBuffer, index: int, local: torch.Tensor, value: torch.Tensor) -> None:
    """Write a parameter-shaped value into this rank's part of a flat tensor."""
    _check_shape(flat, index, value)
    whole = local.numel() == flat.numel
    place = flat.layout.ranges[index]
    low, high = (0, flat.numel) if whole else (flat.own.start, flat.own.stop)
    part = place.overlap(low, high)
    if part is not None:
        base = place.start - low
        local[base + part[0] : base + part[1]] = value.detach().reshape(-1)[part[0] : part[1]].to(local)


def _check_shape(flat: FlatBuffer, index: int, value: torch.Tensor) -> None:
    place = flat.layout.ranges[index]
    if tuple(value.shape) != place.shape:
        raise ModelError(
            f"the value for parameter '{place.name}' has shape {list(value.shape)}; it must be {list(place.shape)}"
        )


# ---------------------------------------------------------------------------------------------------------------- masters
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The full master weights in fp32 (the parameter's own values if it is not trained). Collective."""
    found = _place(param)
    if found is None:
        return param.detach().float().clone() if param.numel() or 0 in param.shape else None
    home, flat = found
    flat.take_edits()
    kept = flat.master if flat.master is not None else flat.shard
    assert kept is not None
    return _gathered(flat.communicator, flat, home.index, kept).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite master and live weights on every rank, each giving the same full value. Collective."""
    found = _place(param)
    if found is None:
        param.detach().copy_(value)
        return
    home, flat = found
    _check_shape(flat, home.index, value)
    home.unit.finish_refresh()
    flat.write(home.index, value)
    unit = home.unit
    if flat.place.sharded and unit.slot is not None:
        if unit.slot.pins == 0:
            unit.slot.drain()
            unit.release()
        else:
            param.detach().copy_(value)


# -------------------------------------------------------------------------------------------------------------- gradients
def _gradient(parameter: nn.Parameter) -> tuple[ParameterHome, FlatBuffer, FlatGradient] | None:
    found = _place(parameter)
    if found is None:
        return None
    home, flat = found
    gradient = home.runtime.gradients.of.get(flat.key)
    if gradient is None or home.runtime.micro_batches == 0:
        return None
    home.runtime.gradients.settle()
    return home, flat, gradient


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The full gradient of the window so far, as the step would use it before clipping. Collective.

    Valid between `backward` and `step`; None outside, and for a parameter without a gradient on every rank.
    """
    found = _gradient(param)
    if found is None:
        return None
    home, flat, gradient = found
    used = torch.tensor([float(gradient.used[home.index])], dtype=torch.float64, device=flat.communicator.device)
    anywhere = flat.communicator.read(flat.communicator.sum_vector(used, home.name))
    assert gradient.shard is not None
    full = _gathered(flat.communicator, flat, home.index, gradient.shard)
    if anywhere is not None and not anywhere[0]:
        return None
    return full / home.runtime.gradient_divisor()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient of the window so far; norm, clipping and the step see the new one. Collective."""
    found = _gradient(param)
    if found is None:
        raise ModelError("safe_set_full_grad works between backward and step, on a parameter that is trained")
    home, flat, gradient = found
    assert gradient.shard is not None
    gradient.used[home.index] = True
    _write_local(flat, home.index, gradient.shard, value * home.runtime.gradient_divisor())


def safe_update_full_grad_vectorized(param_list: Sequence[nn.Parameter], update_func: Callable[..., Any]) -> None:
    """`update_func(parameter, full_gradient)` returns the new gradient of each parameter. Collective."""
    for parameter in param_list:
        full = safe_get_full_grad(parameter)
        if full is not None:
            safe_set_full_grad(parameter, update_func(parameter, full))


# ------------------------------------------------------------------------------------------------------------------ moments
def _state_flat(parameter: nn.Parameter, key: str) -> tuple[ParameterHome, FlatBuffer, torch.Tensor] | None:
    """The optimizer's state `key` laid out like the master; None before the first step. Raises ValueError for no such key."""
    found = _place(parameter)
    if found is None or found[1].master is None:
        return None
    home, flat = found
    masters = home.runtime.masters
    master = flat.master
    assert master is not None and masters is not None
    base = 0 if flat.optimizer_whole else flat.own.start
    out = torch.zeros_like(master)
    seen: set[str] = set()
    for run, start, stop in masters.parts(flat, base, base + master.numel()):
        state = masters.optimizer.state.get(run.master, {})
        seen |= {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 1}
        if key in seen and key in state:
            out[start - base : stop - base] = state[key][start - run.start : stop - run.start]
    if seen and key not in seen:
        raise ValueError(f"the optimizer keeps no state '{key}'; it has {', '.join(sorted(seen))}")
    known = {name for state in masters.optimizer.state.values() for name in state}
    return (home, flat, out) if known else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One full state tensor ("exp_avg", "exp_avg_sq", ...); None before the first step. Collective."""
    found = _state_flat(param, optim_state_key)
    if found is None:
        return None
    home, flat, state = found
    return _gathered(flat.communicator, flat, home.index, state)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrite one full state tensor; every rank gives the same value."""
    found = _state_flat(param, optim_state_key)
    if found is None:
        raise ModelError(f"there is no optimizer state '{optim_state_key}' before the first step")
    home, flat, state = found
    _write_local(flat, home.index, state, value)
    masters = home.runtime.masters
    base = 0 if flat.optimizer_whole else flat.own.start
    for run, start, stop in masters.parts(flat, base, base + state.numel()):
        masters.optimizer.state[run.master][optim_state_key][start - run.start : stop - run.start] = state[
            start - base : stop - base
        ]


# ------------------------------------------------------------------------------------------------------------- local shards
def _local(parameter: nn.Parameter, flat_tensor: torch.Tensor, flat: FlatBuffer, index: int) -> torch.Tensor:
    assert hasattr(parameter, "ds_id"), "local shards exist at ZeRO stage 3 only; use the safe_get_full_* functions"
    part = flat.local_part(index)
    return flat_tensor[part[0]] if part is not None else flat_tensor[:0]


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the master, flat; empty when it owns no element. Not collective."""
    found = _place(param)
    assert found is not None and found[1].master is not None, "the parameter is not trained by a onecopy engine"
    return _local(param, found[1].master, found[1], found[0].index)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the gradient of the window so far, flat. Collective (reductions are finished first)."""
    found = _gradient(param)
    if found is None:
        return None
    home, flat, gradient = found
    assert gradient.shard is not None
    return _local(param, gradient.shard, flat, home.index) / home.runtime.gradient_divisor()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of one optimizer state, flat. Not collective."""
    found = _state_flat(param, optim_state_key)
    return None if found is None else _local(param, found[2], found[1], found[0].index)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite this rank's part of the master; the live weight follows at its next gather. Not collective."""
    local = safe_get_local_fp32_param(param)
    assert local is not None
    local.copy_(value.reshape(-1))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient. Collective (reductions are finished first)."""
    found = _gradient(param)
    assert found is not None and found[2].shard is not None, "safe_set_local_grad works between backward and step"
    home, flat, gradient = found
    assert gradient.shard is not None
    _local(param, gradient.shard, flat, home.index).copy_(value.reshape(-1) * home.runtime.gradient_divisor())


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's part of one optimizer state. Not collective."""
    found = _place(param)
    assert found is not None
    home, flat = found
    part = flat.local_part(home.index)
    if part is None:
        return
    base = 0 if flat.optimizer_whole else flat.own.start
    masters, offset = home.runtime.masters, 0
    for run, start, stop in masters.parts(flat, base + part[0].start, base + part[0].stop):
        state = masters.optimizer.state[run.master][optim_state_key]
        state[start - run.start : stop - run.start] = value.reshape(-1)[offset : offset + stop - start]
        offset += stop - start
