"""A run's record: a line a step, and one step whose memory equals a rehearsal's to the byte; nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
from onecopy.plan import rehearse, virtual_world
from tests.plan.test_exact import LENGTH, document, gpt
from tests.worlds import world


def trained(folder: str, stage: int, accumulation: int, steps: int, detail: int) -> dict[str, Any]:
    config = {**document(stage, "bf16", accumulation), "onecopy": {"record": folder, "record_step": detail}}
    subject = gpt()
    engine, *_ = onecopy.initialize(model=subject.build().train(), config=config)
    before = (type(engine.timers), vars(engine.communicator).keys() & {"start_gather", "start_reduce"})
    for _ in range(steps * accumulation):
        loss = subject.loss(engine(**subject.batch(2, LENGTH)))
        engine.backward(loss)
        engine.step()
    after = (type(engine.timers), vars(engine.communicator).keys() & {"start_gather", "start_reduce"})
    hooks = len(engine.module._forward_pre_hooks)
    engine.destroy()
    return {"clean": before == after, "hooks": hooks}


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), (1, 2)])
def test_the_recorded_step_is_the_planned_one(tmp_path: Path, stage: int, accumulation: int) -> None:
    results = world(2).run(trained, str(tmp_path), stage, accumulation, 4, 3)
    assert all(result["clean"] for result in results) and results[0]["hooks"] == results[1]["hooks"]
    lines = [json.loads(line) for line in (tmp_path / "run_record.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "step", "step", "detail", "step"]
    assert lines[0]["ranks"] == 2 and lines[0]["inputs"] == [[2, LENGTH], [2, LENGTH]] and lines[1]["seconds"] > 0
    with virtual_world(2, accelerator=False):
        planned = rehearse(gpt(), document(stage, "bf16", accumulation), 2, LENGTH, windows=2)
    detail = lines[4]
    held = {name: size for name, size in detail["peak_bytes_by_category"].items() if name != "batch"}
    expected = {name: size for name, size in planned.at_peak().items() if name != "batch"}
    for name in ("parameters", "slots", "masters", "moments"):
        assert held[name] == expected[name], name
    # The loop above keeps its last loss over the step, and a batch of its own a micro-batch.
    assert sum(held.values()) == pytest.approx(sum(expected.values()), rel=0.001)
    assert {bar[0] for bar in detail["bars"]} == {"compute", "gather", "reduce"}
    assert [mark[1] for mark in detail["marks"]] == ["forward", "backward"] * accumulation + ["step"]


def test_an_unfinished_step_leaves_no_dispatch_mode(tmp_path: Path) -> None:
    world(1).run(trained, str(tmp_path), 3, 1, 1, 2)  # destroyed with the recorded step under way
    assert world(1).run(mode_stack) == [0]
    lines = (tmp_path / "run_record.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "step"]


def mode_stack() -> int:
    return torch._C._len_torch_dispatch_stack()
