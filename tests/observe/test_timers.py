"""Phases nest, add up, and cost nothing when off."""

import threading
import time

import torch

from onecopy.observe import NO_TIMERS, PHASES, Timers, timers_for


class FakeEvent:
    """An event of a device whose clock the test sets."""

    now = 0.0
    done_until = 0.0
    made = 0
    waits = 0

    def __init__(self, enable_timing=False):
        assert enable_timing
        FakeEvent.made += 1

    def record(self):
        self.at = FakeEvent.now

    def query(self):
        return self.at <= FakeEvent.done_until

    def synchronize(self):
        FakeEvent.waits += not self.query()

    def elapsed_time(self, other):
        return other.at - self.at


def device_timers(monkeypatch):
    for name in ("now", "done_until", "made", "waits"):
        monkeypatch.setattr(FakeEvent, name, 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: type("module", (), {"Event": FakeEvent}))
    return Timers("cuda")


def test_an_inner_phase_is_taken_out_of_the_outer_one(monkeypatch):
    timers = device_timers(monkeypatch)
    with timers.phase("forward"):
        FakeEvent.now = 3
        with timers.phase("gather wait"):
            FakeEvent.now = 5
        FakeEvent.now = 6
        with timers.phase("gather wait"), timers.phase("innermost"):
            FakeEvent.now = 10
    with timers.phase("step"):
        FakeEvent.now = 17
    timers.step_done()
    timers.step_done()
    means = timers.milliseconds()
    assert list(means) == [*PHASES, "innermost", "total"]
    assert [means[name] for name in ("forward", "gather wait", "innermost", "step", "backward")] == [2, 1, 2, 3.5, 0]


def test_the_host_waits_for_the_device_only_when_numbers_are_read(monkeypatch):
    timers = device_timers(monkeypatch)
    for _ in range(100):
        FakeEvent.done_until = FakeEvent.now - 20
        with timers.phase("forward"):
            FakeEvent.now += 5
        timers.step_done()
    assert FakeEvent.waits == 0
    assert FakeEvent.made < 20  # events that were read are used again
    assert timers.milliseconds()["forward"] == 5
    assert FakeEvent.waits > 0


def test_a_phase_left_by_an_exception_does_not_spoil_the_next(monkeypatch):
    timers = device_timers(monkeypatch)
    timers.start("forward")
    timers.start("gather wait")  # raised inside: neither is stopped
    timers.stop("nothing of this name")
    with timers.phase("backward"):
        FakeEvent.now = 4
    FakeEvent.now = 5
    timers.stop("forward")
    means = timers.milliseconds()
    assert (means["backward"], means["forward"], means["gather wait"]) == (4, 1, 0)


def test_table_and_reset():
    timers = Timers()
    with timers.phase("forward"):
        time.sleep(0.01)
    timers.step_done()
    table = timers.table()
    rows = table.splitlines()
    assert rows[0].split() == ["phase", "ms", "a", "step", "share", "calls"]
    assert [row.split("  ")[0] for row in rows[1:]] == [*PHASES, "other", "total"]
    assert timers.milliseconds()["forward"] >= 10
    timers.reset()
    assert timers.milliseconds()["forward"] == 0


def test_hooks_in_another_thread_nest_in_the_callers_phase():
    timers = Timers()

    def hook():
        with timers.phase("reduce wait"):
            time.sleep(0.01)

    with timers.phase("backward"):
        thread = threading.Thread(target=hook)
        thread.start()
        thread.join()
    means = timers.milliseconds()
    assert means["reduce wait"] >= 10 and means["backward"] < means["reduce wait"]


def test_off_costs_next_to_nothing():
    timers = timers_for(False)
    assert timers is NO_TIMERS and not timers.enabled
    rounds = 10_000
    began = time.perf_counter()
    for _ in range(rounds):
        with timers.phase("forward"):
            pass
    assert (time.perf_counter() - began) / rounds < 5e-6
    timers.start("forward")
    timers.stop("forward")
    timers.step_done()
    timers.reset()
    assert (timers.table(), timers.milliseconds()) == ("", {})
