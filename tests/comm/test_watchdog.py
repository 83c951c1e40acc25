"""A long wait is warned of once; ranks that take different paths get an error that names what each of them waits for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from onecopy import zero
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


def come_late(late: int, seconds: float) -> list[str]:
    """What this rank warns of while rank `late` comes late to `initialize`, to a forward, and to a construction."""
    os.environ["ONECOPY_WARN_AFTER_SECONDS"] = "0.5"
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)

    def wait_for_it() -> None:
        if dist.get_rank() == late:
            time.sleep(seconds)

    try:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # type: ignore[index]
        wait_for_it()
        engine, *_ = onecopy.initialize(model=nn.Sequential(nn.Linear(8, 8)), config=config)
        wait_for_it()
        engine(torch.ones(1, 8))
        engine(torch.ones(1, 8))
        engine.destroy()
        group = dist.new_group()
        wait_for_it()
        with zero.Init(data_parallel_group=group):
            nn.Linear(8, 8)
    finally:
        logging.getLogger("onecopy").removeHandler(handler)
    return [message for message in said if "waited for" in message]


def test_a_long_wait_is_said_once_by_one_rank_and_names_who_is_missing(world: GetWorld) -> None:
    first, second, last = world(3).run(come_late, 1, 1.2, timeout=60, stray_groups=True)
    assert second == [] and last == [] and len(first) == 3, (first, second, last)
    assert "meeting of all ranks that starts an engine" in first[0] and "gather of" in first[1]
    assert "weight" in first[2]
    assert all("rank 1 has not come to it" in message and "of 3 ha" in message for message in first), first
