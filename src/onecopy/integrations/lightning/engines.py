"""Engines of Lightning's modules: made, and given up so that the module is whole again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onecopy.engine import Engine, start
from onecopy.engine.handover import engine_of, give_up, remember
from onecopy.observe.log import keep_quiet


def make_engine(module: nn.Module, config: dict[str, Any], device: torch.device, optimizer: Any = None) -> Engine:
    """Shard `module` over all ranks on `device`. Collective."""
    with _on(device):
        engine, *_ = start.initialize(model=module, config=config, optimizer=optimizer, dist_init_required=False)
    engine.lr_scheduler = None  # Lightning steps its schedulers itself
    remember(engine)
    keep_quiet(("scheduler not given", id(engine)))  # and saves them
    return engine


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Let engines be made on the device that Lightning chose, which may be the CPU beside a GPU."""
    before: Any = vars(start)["default_device"]
    setattr(start, "default_device", lambda: device)  # noqa: B010
    try:
        yield
    finally:
        setattr(start, "default_device", before)  # noqa: B010


def release(module: nn.Module) -> None:
    """Make `module` an ordinary one again, with its whole weights on every rank. Collective.

    After `fit` a module stays sharded, so that the next `test` needs no memory for it. Call this to use it without the
    strategy. Trained weights come back in the precision of their masters, on the device they were sharded on.
    """
    engine = engine_of(module)
    if engine is not None:
        give_up(engine)
