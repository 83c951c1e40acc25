"""What moves within a window beside gradients: random generators, and the buffers that forwards write.

A save in the middle of a window is one of the boundary before it, so both are kept as they were there. Which buffers a
forward writes cannot be told from their versions (batch norm's statistics change without one), so all are kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that `state_dict` holds, under every name they have."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for local, buffer in module._buffers.items():
            if buffer is not None and local not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{local}" if prefix else local), buffer


def generators(device: torch.device) -> dict[str, Any]:
    """The states of all random generators of this process as they give them: quick enough for every step."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device.type).get_rng_state(device)
    return state


class MovingState:
    """Keeps what moves on this rank as it was at the last boundary. Nothing here is collective.

    Attributes:
        random: the states of the random generators then; None when nothing is kept.
        buffers: the persistent buffers then, by name.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.random: dict[str, Any] | None = None
        self.buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """A boundary: keep what is there now, in the memory of what was kept before."""
        self.random = generators(self.device)
        now = dict(persistent_buffers(self.model))
        if {name: _kind(buffer) for name, buffer in now.items()} != {n: _kind(b) for n, b in self.buffers.items()}:
            self.buffers = {name: buffer.detach().clone() for name, buffer in now.items()}
        else:
            for name, kept in self.buffers.items():
                kept.copy_(now[name])

    def forget(self) -> None:
        """Keep nothing."""
        self.random, self.buffers = None, {}


def _kind(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return buffer.shape, buffer.dtype, buffer.device
