"""The small state beside the tensors: counters, schedule, loss scale, optimizer groups, the user's own; plain data only.

What is written loads with `torch.load(weights_only=True)` and without this package: no class of ours or of anybody's.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy
import torch

from onecopy.checkpoint.checksum import crc32
from onecopy.checkpoint.pieces import buffers_to_save, in_mid_window, optimizer_groups
from onecopy.checkpoint.random_state import plain_state
from onecopy.checkpoint.writer import raw_bytes
from onecopy.engine.dataloader import ShardedDataLoader
from onecopy.engine.moving_state import generators, persistent_buffers
from onecopy.errors import CheckpointError
from onecopy.observe.log import log_once, warn

if TYPE_CHECKING:
    from onecopy.engine import Engine

NAME = "state.pt"
RESERVED = frozenset({
    "module", "optimizer", "lr_scheduler", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "micro_steps",
    "loss_scaler",
})  # fmt: skip
"""Names that the engine's own state has in a checkpoint; a `client_state` with one of them is refused."""


def check_client_state(client_state: Any) -> dict[str, Any]:
    """The user's dictionary as it can be saved. Raises CheckpointError naming a reserved key or an unsafe value."""
    if client_state is None:
        return {}
    if not isinstance(client_state, dict):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}; it must be a dictionary")
    taken = sorted(str(key) for key in client_state if key in RESERVED)
    if taken:
        raise CheckpointError(
            f"client_state has the key{'s' if len(taken) > 1 else ''} {', '.join(map(repr, taken))}, which the engine's own state has; "
            "choose another name (load_checkpoint restores the engine's counters by itself)"
        )
    return plain(client_state, "client_state")  # type: ignore[no-any-return]


def plain(value: Any, place: str) -> Any:
    """A copy in types that load safely: numpy's numbers become Python's. Raises CheckpointError naming what has none."""
    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return type(value)((_key(k, place), plain(v, f"{place}[{k!r}]")) for k, v in value.items())
    if type(value) in (list, tuple, set):
        return type(value)(plain(v, f"{place}[{i}]") for i, v in enumerate(value))
    if isinstance(value, torch.Tensor):
        return (
            value.detach().cpu()
            if type(value) in (torch.Tensor, torch.nn.Parameter)
            else value.detach().as_subclass(torch.Tensor).cpu()
        )
    if value is None or type(value) in (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size):
        return value
    if _loads_safely(value):
        return value
    hint = "; save vars(...) of it" if hasattr(value, "__dict__") else ""
    if isinstance(value, numpy.ndarray):
        hint = "; save torch.from_numpy(...) of it"
    raise CheckpointError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which torch.load(weights_only=True) refuses to read{hint}"
    )


def _key(key: Any, place: str) -> Any:
    return plain(key, f"a key of {place}")


def _loads_safely(value: Any) -> bool:
    try:
        torch.load(io.BytesIO(to_bytes(value)), weights_only=True)
        return True
    except Exception:  # whatever pickling somebody's class may raise
        return False


def to_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def from_bytes(content: bytes, place: str) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{place} cannot be read: {str(error).splitlines()[0]}") from error


def common_state(engine: Engine, client_state: dict[str, Any]) -> dict[str, Any]:
    """What is the same on every rank. Not collective."""
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.window.micro_steps_at_boundary,
        "loss_scaler": engine.scaler.state_dict() if engine.scaler is not None else None,
        "lr_scheduler": _scheduler_state(engine),
        "optimizer_groups": plain(optimizer_groups(engine), "the optimizer's groups"),
        "optimizer_class": type(engine.basic_optimizer).__name__ if engine.basic_optimizer is not None else None,
        "optimizer_options": list(getattr(engine.basic_optimizer, "defaults", ())),
        "data": _data_position(engine),
        "extra_state": {
            name: plain(value, f"the extra state of module '{name}'") for name, value in extra_states(engine).items()
        },
        "config": _json_like(engine.config),
        "client_state": client_state,
    }


def checksums_of_buffers(engine: Engine) -> dict[str, int]:
    """By which ranks find out whose buffers differ: running statistics and counters may be every rank's own."""
    if engine.communicator.world_size == 1:
        return {}
    return {name: crc32(raw_bytes(buffer.reshape(-1))) for name, buffer in buffers_to_save(engine).items()}


def own_state(engine: Engine, own: dict[str, int], *shared: dict[str, int]) -> dict[str, Any]:
    """What is this rank's alone: random generators, and buffers whose checksums are not those of the ones it may be given."""
    random = engine.moving.random if in_mid_window(engine) else None
    buffers = buffers_to_save(engine)
    return {
        "random": plain_state(random if random is not None else generators(engine.device)),
        "buffers": {
            name: plain(buffers[name], name)
            for name, checksum in own.items()
            if any(checksums.get(name) != checksum for checksums in shared)
        },
    }


def restore_own_buffers(engine: Engine, own: dict[str, Any]) -> None:
    """Give this rank the buffers it had of its own."""
    saved = own.get("buffers", {})  # checkpoints of older versions have none
    with torch.no_grad():
        for name, buffer in persistent_buffers(engine.module):
            if name in saved and saved[name].shape == buffer.shape:
                buffer.copy_(saved[name])


def _scheduler_state(engine: Engine) -> Any:
    scheduler = engine.lr_scheduler
    if scheduler is None:
        step = getattr(engine.basic_optimizer, "step", None)
        outer = getattr(engine.optimizer, "step", None)
        if getattr(step, "_wrapped_by_lr_sched", False) or getattr(outer, "_wrapped_by_lr_sched", False):
            log_once(
                ("scheduler not given", id(engine)),
                "a learning rate scheduler works on this optimizer but was not given to initialize, so its state is not in the checkpoint; "
                "put scheduler.state_dict() into client_state, or give it to initialize as lr_scheduler=",
            )
        return None
    if not hasattr(scheduler, "state_dict"):
        log_once(
            ("scheduler without state", id(engine)),
            f"{type(scheduler).__name__} has no state_dict(), so it is not in the checkpoint",
        )
        return None
    return plain(scheduler.state_dict(), "the scheduler's state_dict()")


def _data_position(engine: Engine) -> Any:
    loader = engine.training_dataloader
    if loader is None or not hasattr(loader, "state_dict"):
        return None
    if isinstance(loader, ShardedDataLoader):  # a window's batches that no step has used are taken again
        return plain(loader.state_dict(unused_batches=engine.runtime.micro_batches), "the data loader's state_dict()")
    return plain(loader.state_dict(), "the data loader's state_dict()")


def extra_states(engine: Engine) -> dict[str, Any]:
    """What modules give through `get_extra_state`, by module name."""
    return {
        name: module.get_extra_state()
        for name, module in engine.module.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    }


def restore_scheduler(engine: Engine, saved: Any) -> None:
    """Let the schedule go on where it was; the scheduler object and the optimizer's groups stay the ones they are."""
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return
    if saved is None:
        warn("the checkpoint holds no scheduler state; the learning rate schedule starts anew")
    elif hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(saved)
        # Torch's schedules leave the groups' rates to the optimizer's state, and many make the next rate from the last.
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
        rates = getattr(scheduler, "_last_lr", None) or ()  # DeepSpeed's have none before their first step
        for group, rate in zip(groups, rates, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)


def _json_like(value: Any) -> Any:
    """A configuration as plain data; what is not is written as its text."""
    if isinstance(value, dict):
        return {str(k): _json_like(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_like(v) for v in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)
