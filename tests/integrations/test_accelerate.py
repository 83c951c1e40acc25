"""accelerate's DeepSpeed plugin on two CPU ranks: the weights of a plain torch loop at every stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.commands import run_python

pytest.importorskip("accelerate")

LOOP = Path(__file__).with_name("accelerate_loop.py")


def plain_weights() -> dict[str, list[float]]:
    """One process, with the 16 rows of two ranks and two micro-batches in a step."""
    from tests.integrations.accelerate_loop import examples, small_model

    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, targets = examples().tensors
    for _ in range(2):
        for start in range(0, 64, 16):
            optimizer.zero_grad()
            (model(rows[start : start + 16]) - targets[start : start + 16]).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return {name: weight.detach().flatten().tolist() for name, weight in model.named_parameters()}


def test_the_documented_loop_trains_saves_and_loads_at_every_stage(tmp_path: Path) -> None:
    command = ("-m", "onecopy", "run", "--nproc", "2", "--force", str(LOOP), "1", "2", "3")
    done = run_python(*command, folder=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)]
    assert len(found) == 3
    for weights in found:
        for name, weight in plain_weights().items():
            assert weights[name] == pytest.approx(weight, rel=1e-4, abs=1e-6), name
