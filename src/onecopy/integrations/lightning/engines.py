"""Engines of Lightning's modules: made, and given up so that the module is whole again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import connect
from onecopy.config import load
from onecopy.engine import Engine
from onecopy.engine.handover import engine_of, give_up, remember
from onecopy.observe.log import keep_quiet


def make_engine(module: nn.Module, config: dict[str, Any], device: torch.device, optimizer: Any = None) -> Engine:
    """Shard `module` over all ranks on `device`. Collective."""
    resolved = load(config, world_size=dist.get_world_size())
    communicator = connect(None, device, resolved.onecopy.timeout_seconds)
    try:
        engine = Engine(module, resolved, communicator, optimizer)
    except BaseException:
        communicator.close()
        raise
    remember(engine)
    keep_quiet(("scheduler not given", id(engine)))  # Lightning saves its schedulers itself
    return engine


def release(module: nn.Module) -> None:
    """Make `module` an ordinary one again, with its whole weights on every rank. Collective.

    After `fit` a module stays sharded, so that the next `test` needs no memory for it. Call this to use it without the
    strategy. Trained weights come back in the precision of their masters, on the device they were sharded on.
    """
    engine = engine_of(module)
    if engine is not None:
        give_up(engine)
