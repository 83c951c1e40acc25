"""An adversarial back end: everything completes as late as allowed, and buffers are poison until then and afterwards.

What the engine reads too early, or uses again too soon, becomes NaN and shows in the weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onecopy
from onecopy.comm.wire import Wire
from tests.reference import Case, assert_same_bits, started, trained
from tests.worlds import World
from tests.zoo import Shape


class LateGather:
    """Receives nothing before `wait`; until then the other ranks' parts are NaN."""

    def __init__(self, start: Any, wire: Wire, key: int, label: str) -> None:
        self.own = wire.own.clone()
        self.start, self.wire, self.key, self.label = start, wire, key, label
        self.done = False
        wire.buffer.fill_(float("nan"))

    def wait(self) -> None:
        if not self.done:
            self.done = True
            self.wire.own.copy_(self.own)
            pending = self.start(self.wire, self.key, self.label)
            pending.wait()
            pending.drain()

    drain = wait


class LateReduce:
    """Sends what the buffer held at the start, at `finish` only; the buffer is NaN from the start on."""

    def __init__(self, communicator: Any, start: Any, wire: Wire, key: int, label: str) -> None:
        self.held = communicator.wire(wire.buffer.clone())
        self.start, self.buffer, self.key, self.label = start, wire.buffer, key, label
        wire.buffer.fill_(float("nan"))

    def finish(self, out: torch.Tensor, accumulate: bool) -> None:
        assert torch.isnan(self.buffer).all(), f"the buffer of {self.label} was used while its reduction was under way"
        pending = self.start(self.held, self.key, self.label)
        pending.finish(out, accumulate)
        pending.drain()

    def drain(self) -> None:
        pass


def make_late(communicator: Any) -> None:
    gather, reduce = communicator.start_gather, communicator.start_reduce
    communicator.start_gather = lambda wire, key, label: LateGather(gather, wire, key, label)
    communicator.start_reduce = lambda wire, key, label: LateReduce(communicator, reduce, wire, key, label)


def on_time_and_late(cases: list[Case], repeats: int) -> list[list[Any]]:
    runs = []
    for case in cases:
        same = [trained(case)]
        for _ in range(repeats):
            engine, _ = started(case)
            make_late(engine.communicator)
            same.append(trained(case, engine))
        runs.append(same)
    return runs


@pytest.mark.parametrize("size", [2, 3])
def test_late_completion_changes_no_bit(world: Any, size: int) -> None:
    """Many small buckets, overlap on, several steps: no buffer is read before it is whole nor used while it travels."""
    shape = Shape(9, ("linear", "norm", "branches", "alternate", "wide"), reused=True, outside=True, root=True)
    zero = {"overlap_comm": True, "reduce_bucket_size": 100, "stage3_param_persistence_threshold": 5}
    cases = [
        Case(shape, stage=stage, windows=windows, zero=zero) for stage in range(4) for windows in ((1, 1, 1), (2, 2))
    ]
    for same in world(size).run(on_time_and_late, cases, 1)[0]:
        assert_same_bits(same[0], same[1])
        assert all(torch.isfinite(weight).all() for weight in same[1].weights.values())


def repeated(cases: list[Case]) -> list[Any]:
    return [trained(case) for case in cases]


def test_the_same_run_gives_the_same_bits(world2: World) -> None:
    """Five identical runs of stages 2 and 3 with overlap and many small buckets."""
    zero = {"overlap_comm": True, "reduce_bucket_size": 50}
    for stage in (2, 3):
        case = Case(Shape(11, ("linear", "wide", "linear", "norm")), stage=stage, zero=zero, windows=(2, 2, 2))
        runs = world2.run(repeated, [case] * 5)[0]
        for run in runs[1:]:
            assert_same_bits(runs[0], run)
    assert onecopy.__version__


def test_buckets_and_overlap_change_no_bit(world2: World) -> None:
    """Buckets of one element to more than the model, overlap on and off, at every stage: one result."""
    shape = Shape(9, ("linear", "wide", "scalar", "linear"), tied=True)
    cases = [
        Case(shape, stage=stage, zero={"reduce_bucket_size": bucket, "overlap_comm": overlap})
        for stage in range(4)
        for bucket in (1, 7, 1000, 1_000_000_000)
        for overlap in (True, False)
    ]
    runs = world2.run(repeated, cases)[0]
    for case, run in zip(cases, runs, strict=True):
        assert_same_bits(runs[0], run, case)
