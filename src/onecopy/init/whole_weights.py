"""All weights whole on every rank for a while, and the model an ordinary one: for code whose ranks go separate ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from onecopy.engine import Engine
from onecopy.init.gathered import GatheredParameters


@contextmanager
def whole_weights(engine_or_model: Engine | nn.Module) -> Iterator[None]:
    """Inside, a forward needs no other rank, so ranks may call the model differently often. Without gradients.

    Entering and leaving are collective. Memory: the whole model in its compute dtype on every rank. Changes of weights
    inside are discarded. A model that no engine has only has its early shards gathered.
    """
    model = engine_or_model.module if isinstance(engine_or_model, Engine) else engine_or_model
    runtimes: dict[int, Any] = {}
    for parameter in model.parameters():
        home = getattr(parameter, "_onecopy", None)
        if home is not None and home.runtime.attached:
            runtimes[id(home.runtime)] = home.runtime
    with GatheredParameters(list(model.parameters())):
        for runtime in runtimes.values():
            runtime.detach()
        try:
            yield
        finally:
            for runtime in runtimes.values():
                runtime._attach()
