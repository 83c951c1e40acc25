"""The `flops_profiler` block: rank 0 reports one forward's operations, and training goes on with the same bits."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecopy
from tests.reference import configuration
from tests.worlds import World

GetWorld = Callable[[int], World]
WIDTH, DEPTH, ROWS = 8, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.wide(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result.square().mean()


def losses(stage: int, **block: Any) -> list[float]:
    document = {**configuration(stage), "gradient_accumulation_steps": 2, "flops_profiler": block}
    engine, *_ = onecopy.initialize(model=Net(), config=document)
    assert engine.flops_profiler_enabled() is bool(block)
    found = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        if block:
            with torch.no_grad():
                engine(torch.randn(3, WIDTH))  # an evaluation is not what is asked for
        loss = engine(torch.randn(ROWS, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def report(folder: str, stage: int) -> tuple[str, list[str]]:
    file = Path(folder) / "made" / "profile.txt"
    plain = losses(stage)
    assert losses(stage, enabled=True, output_file=str(file), profile_step=2, top_modules=2) == plain
    dist.barrier()
    others = [path.name for path in file.parent.iterdir()]
    return file.read_text(), others


@pytest.mark.parametrize("stage", [1, 3])
def test_one_forward_is_counted_and_nothing_else_changes(world: GetWorld, tmp_path: Path, stage: int) -> None:
    (text, names), _ = world(2).run(report, str(tmp_path), stage)
    assert names == ["profile.txt"] and text.startswith("Flops profile at step 3\n")
    block = ROWS * 2 * WIDTH * 4 * WIDTH
    parameters = DEPTH * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) + 5 * WIDTH + 5
    said = dict(re.findall(r"^(\S.*?\S) {2,}(\S.*)$", text, re.MULTILINE))
    assert said["forward MACs"] == f"{round((DEPTH * block + ROWS * 5 * WIDTH) / 1000, 2):g} KMACs"
    assert said["parameters a rank trains with"] == f"{round(parameters / 1000, 2):g} K" and said["ranks"] == "2"
    assert all(name in said for name in ("backward latency", "step latency", "samples a second", "FLOPS a rank"))
    assert f"(layers) ModuleList: {round((parameters - 45) / 1000, 2):g} K params" in text
    assert text.count(") Block: ") == DEPTH and text.count(f"{round(block / 1000, 2):g} KMACs") >= DEPTH
    assert "MACs        - ModuleList: " in text


def say(stage: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    try:
        losses(stage, enabled=True, detailed=False)
    finally:
        logging.getLogger("onecopy").removeHandler(handler)
    return [message for message in said if "Flops profile at step 2" in message]


def test_without_a_file_it_is_said_once_by_rank_0(world: GetWorld) -> None:
    (text,), nothing = world(2).run(say, 2)
    assert nothing == [] and "(layers)" not in text
