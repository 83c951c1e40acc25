"""What moves within a window beside gradients: random generators, and the buffers that forwards write.

A save in the middle of a window is one of the boundary before it, so both are kept as they were there. Which buffers a
forward writes cannot be told from their versions (batch norm's statistics change without one), so all are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that `state_dict` holds, under every name they have."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for local, buffer in module._buffers.items():
            if buffer is not None and local not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{local}" if prefix else local), buffer


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
        from onecopy.checkpoint.random_state import generators

        self.random = generators(self.device)
        old, self.buffers = self.buffers, {}
        for name, buffer in persistent_buffers(self.model):
            kept = old.get(name)
            fits = kept is not None and (kept.shape, kept.dtype, kept.device) == (
                buffer.shape,
                buffer.dtype,
                buffer.device,
            )
            self.buffers[name] = kept.copy_(buffer) if kept is not None and fits else buffer.detach().clone()

    def forget(self) -> None:
        """Keep nothing."""
        self.random, self.buffers = None, {}
