"""`OneCopyFabricStrategy`: Fabric's loops give the weights of Fabric's DDP at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.fabric import Fabric

from onecopy.errors import ModelError
from onecopy.integrations.lightning import OneCopyFabricStrategy, single_file
from tests.integrations.lightning_runs import Net, fabric_run, loader, whole_weights
from tests.worlds import world

CLOSE: dict[str, Any] = {"rel": 1e-5, "abs": 1e-6}


def every_stage(folder: Path) -> list[list[float]]:
    found = [fabric_run("ddp", "")]
    return found + [fabric_run(OneCopyFabricStrategy(stage), str(folder / f"stage{stage}")) for stage in range(4)]


def test_every_stage_trains_saves_and_loads_as_ddp(tmp_path: Path) -> None:
    for plain, *stages in world(2).run(every_stage, tmp_path, stray_groups=True):
        for weights in stages:
            assert weights == pytest.approx(plain, **CLOSE)
    single_file(tmp_path / "stage3", tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert saved["epoch"] == 1 and set(saved["state_dict"]) == set(Net().state_dict())


def accumulate(strategy: Any, precision: Any = "32-true") -> dict[str, Any]:
    """Two backwards a step, the first without communication, clipped; a second module for inference."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    fabric.launch()
    with fabric.init_module():
        model = Net()
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    module.mark_forward_method("loss")
    teacher = Net()
    scores = fabric.setup_module(teacher)
    scores.mark_forward_method("loss")
    norms = []
    for index, batch in enumerate(fabric.setup_dataloaders(loader(32))):
        with torch.no_grad():
            assert scores.loss(batch).isfinite()
        last = index % 2 == 1
        with fabric.no_backward_sync(module, enabled=not last):
            fabric.backward(module.loss(batch) / 2, model=module)
        if last:
            norms.append(fabric.clip_gradients(module, optimizer, max_norm=0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": norms, "weights": whole_weights(model)}


def loops() -> dict[str, Any]:
    found = {
        name: accumulate(s) for name, s in (("ddp", "ddp"), ("2", OneCopyFabricStrategy(2)), ("3", "onecopy_stage_3"))
    }
    found["bf16"] = accumulate(OneCopyFabricStrategy(3), "bf16-mixed")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=OneCopyFabricStrategy(3))
    fabric.launch()
    refused = []
    model = Net()
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.blocks, model.head)]
    for call in (lambda: fabric.setup(model, *halves), lambda: fabric.setup_optimizers(halves[0])):
        try:
            call()
        except (ModelError, RuntimeError) as error:
            refused.append(str(error))
    return {**found, "refused": refused}


def test_accumulation_and_clipping_as_ddp() -> None:
    for found in world(2).run(loops, stray_groups=True):
        for name in ("2", "3"):
            assert found[name]["norms"] == pytest.approx(found["ddp"]["norms"], **CLOSE)
            assert found[name]["weights"] == pytest.approx(found["ddp"]["weights"], **CLOSE)
        assert found["bf16"]["norms"] == pytest.approx(found["ddp"]["norms"], rel=0.1)
        assert "2 optimizers" in found["refused"][0] and len(found["refused"]) == 2
