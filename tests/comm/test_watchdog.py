"""Ranks that take different paths get an error that names what each of them waits for, within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy.errors import CommunicationError
from tests.worlds import World

GetWorld = Callable[[int], World]


class Forked(nn.Module):
    """Rank 1 leaves a block out from the second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for place, layer in enumerate(self.layers):
            if place == 3 and self.calls > 1 and dist.get_rank() == 1:
                continue
            x = layer(x)
        return x.mean()


def diverge() -> tuple[str, float]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "onecopy": {"timeout_seconds": 20},
    }
    engine, *_ = onecopy.initialize(model=Forked(), config=config)
    started = time.monotonic()
    try:
        for _ in range(6):
            engine.backward(engine(torch.randn(1, 8)))
            engine.step()
    except CommunicationError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.slow
def test_different_paths_are_named_on_every_rank(world: GetWorld) -> None:
    for message, seconds in world(2).run(diverge, timeout=60, stray_groups=True):
        assert "rank 0 waits for the" in message and "rank 1 waits for the" in message
        assert "layers." in message and seconds < 20
