"""On an accelerator: states that leave the device make room on it, and optimizers across shards step as on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from onecopy.engine.parking import KINDS
from tests.engine.small_net import start, step
from tests.engine.test_whole_parameter_optimizers import KINDS as OPTIMIZERS
from tests.engine.test_whole_parameter_optimizers import run
from tests.worlds import world

pytestmark = pytest.mark.skipif("ONECOPY_TEST_GPU" not in os.environ, reason="needs an accelerator (ONECOPY_TEST_GPU)")


def away(stage: int) -> None:
    engine, other = start(stage), start(stage)
    for number in range(4):
        step(engine, number)
        step(other, number)
        before = torch.accelerator.memory_allocated()
        engine.offload_states(include=KINDS[number:], non_blocking=number % 2 == 0)
        assert torch.accelerator.memory_allocated() < before
        engine.reload_states(non_blocking=number % 2 == 0)
        torch.accelerator.synchronize()
    for mine, its in zip(engine.masters.runs, other.masters.runs, strict=True):
        assert torch.equal(mine.master, its.master)
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_states_leave_the_device_and_come_back(size: int, stage: int) -> None:
    world(size).run(away, stage)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_across_shards(kind: str) -> None:
    """The references are computed on the CPU."""
    results: Any = world(2).run(run, kind, (0, 3), 10**6, timeout=300)
    assert results
