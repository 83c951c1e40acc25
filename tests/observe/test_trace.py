"""One step is traced into a file that a browser can read."""

import json
import logging
from contextlib import nullcontext

import torch

from onecopy.observe import StepTracer, label, trace_step
from onecopy.observe.trace import path_for_rank


def names(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def work(name="onecopy: gather"):
    with label(name):
        torch.ones(8) @ torch.ones(8)


def test_trace_of_a_block_has_labels_and_operators(tmp_path):
    with trace_step(tmp_path / "new" / "trace", rank=1) as path:
        work()
    assert path == tmp_path / "new" / "trace.rank1.json"
    assert {"onecopy: gather", "aten::dot"} <= names(path)


def test_only_the_step_asked_for(tmp_path):
    tracer = StepTracer(2, tmp_path / "trace.json", rank=0)
    for step in (1, 2, 3):
        for micro_batch in (0, 1):
            tracer.begin(step)
            work(f"step {step} micro-batch {micro_batch}")
        tracer.end(step)
    found = names(tmp_path / "trace.json")
    assert {"step 2 micro-batch 0", "step 2 micro-batch 1"} <= found
    assert not {"step 1 micro-batch 0", "step 3 micro-batch 0"} & found


def test_a_trace_that_was_begun_is_written_at_close(tmp_path):
    tracer = StepTracer(1, tmp_path / "trace.json", rank=0)
    tracer.close()
    tracer.begin(1)
    work()
    tracer.close()
    assert "onecopy: gather" in names(tmp_path / "trace.json")


def test_no_tracing_costs_nothing(tmp_path):
    tracer = StepTracer(None, tmp_path / "trace.json", rank=0)
    tracer.begin(1)
    tracer.end(1)
    assert isinstance(label("anything"), nullcontext)
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_profiler_is_left_alone_and_sees_the_labels(tmp_path, caplog):
    tracer = StepTracer(1, tmp_path / "trace.json", rank=0)
    with caplog.at_level(logging.WARNING, logger="onecopy"), torch.profiler.profile() as profiler:
        tracer.begin(1)
        work()
        tracer.end(1)
    assert "another profiler is running" in caplog.text
    assert "onecopy: gather" in {event.key for event in profiler.key_averages()}
    assert list(tmp_path.iterdir()) == []


def test_paths():
    assert path_for_rank("a/b.json", 0).as_posix() == "a/b.json"
    assert path_for_rank("a/b.json", 3).as_posix() == "a/b.rank3.json"
