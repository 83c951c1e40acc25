"""Clipping: the reported norm is the one before clipping, and what moves the weights obeys the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.utils import safe_get_full_grad, safe_set_full_grad
from tests.reference import configuration, full_masters
from tests.worlds import World


def clipped(stage: int, edit: float) -> tuple[float, float]:
    """(reported norm, norm of the weights' change) of one SGD step at rate 1 with a huge loss, clipped to 0.1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    config = configuration(stage, gradient_clipping=0.1, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    engine, _, _, _ = onecopy.initialize(model=model, config=config)
    assert engine.get_global_grad_norm() is None and engine.gradient_clipping() == 0.1
    before = full_masters(engine)
    engine.backward(engine(torch.full((2, 6), 1.0 + engine.global_rank)).square().mean() * 1e4)
    if edit != 1.0:
        for parameter in model.parameters():
            gradient: Any = safe_get_full_grad(parameter)
            safe_set_full_grad(parameter, gradient * edit)
    engine.step()
    after = full_masters(engine)
    change = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm, float(change)


def test_the_norm_is_reported_before_clipping_and_the_step_is_clipped(world2: World) -> None:
    """The same norm on all ranks and stages, far above the limit; the weights move by the limit."""
    found = [answer for stage in range(4) for answer in world2.run(clipped, stage, 1.0)]
    assert len({norm for norm, _ in found}) == 1 and found[0][0] > 100
    for _, change in found:
        assert change == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_edited_gradients_enter_the_norm(world2: World, stage: int) -> None:
    """Gradients set between backward and step are the ones that norm, clipping and step see."""
    plain, _ = world2.run(clipped, stage, 1.0)[0]
    edited, change = world2.run(clipped, stage, 0.5)[0]
    assert edited == pytest.approx(plain / 2, rel=1e-5) and change == pytest.approx(0.1, rel=1e-4)
