"""The progress line, and numbers for people."""

import pytest

from onecopy.observe import Progress, format_bytes, format_count, memory_line
from onecopy.observe import progress as module


def test_line(monkeypatch):
    clock = iter([0.0, 2.0, 2.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    progress = Progress()
    for _ in range(4):
        progress.step_done(samples=8, tokens=8000)
    line = progress.line(4, rates=[1e-3, 1e-3, 5e-4], loss=1.23456, skipped=2, loss_scale=65536.0, grad_norm=0.5)
    assert line == (
        "step 4, loss 1.2346, lr 0.001 0.0005, grad norm 0.5, 500 ms a step, 16 samples/s, 16k tokens/s, "
        "loss scale 65536, 2 skipped"
    )


def test_line_without_anything_known():
    assert Progress().line(7) == "step 7"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB"), (2**60, "1024.00 PiB")],
)
def test_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (999, "999"), (12345, "12.3k"), (7e9, "7G"), (1e16, "1e+04T")])
def test_counts(count, text):
    assert format_count(count) == text


def test_memory_line():
    line = memory_line({"parameters": 1024, "slots": 0, "activations_peak": 2048})
    assert line == "memory a rank 3.00 KiB: activations peak 2.00 KiB, parameters 1.00 KiB"
