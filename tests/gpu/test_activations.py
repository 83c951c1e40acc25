"""Inputs of checkpoints that wait on the host while the accelerator computes: the same gradients, and fewer bytes on it.

ONECOPY_TEST_GPU=1 python -m pytest tests/gpu/test_activations.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from onecopy import checkpointing
from onecopy.activations import settings
from tests.worlds import world

pytestmark = pytest.mark.skipif("ONECOPY_TEST_GPU" not in os.environ, reason="needs an accelerator (ONECOPY_TEST_GPU)")


def gradients(storage: dict[str, object] | None) -> tuple[list[torch.Tensor], int, int]:
    """Gradients on the host, bytes stored there at most, and bytes on the device between forward and backward."""
    device = torch.accelerator.current_accelerator()
    checkpointing.configure(None, **(storage or {}))  # type: ignore[arg-type]
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.2)) for _ in range(6)).to(device)
    x = torch.randn(256, 512, device=device)
    y = x
    for layer in layers:
        y = layer(y) if storage is None else checkpointing.checkpoint(layer, y)
    live = torch.accelerator.memory_allocated(device)
    y.square().sum().backward()
    found = [parameter.grad.cpu() for parameter in layers.parameters() if parameter.grad is not None]
    peak = settings.current().storage.held.peak
    settings._current = settings.Settings()
    return found, peak, live


@pytest.mark.parametrize("storage", [{}, {"checkpoint_in_cpu": True}, {"profile": True, "synchronize": True}])
def test_stored_inputs_give_the_same_gradients(storage: dict[str, object]) -> None:
    (plain, _, most), *_ = world(1).run(gradients, None)
    (found, held, live), *_ = world(1).run(gradients, storage)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)) and len(plain) == 12
    assert live < most
    assert held == (6 * 256 * 512 * 4 if "checkpoint_in_cpu" in storage else 0)
