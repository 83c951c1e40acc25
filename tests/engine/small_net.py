"""A small model of blocks, its data, and one training step of it: what the tests of an engine's life share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onecopy
from tests.reference import configuration, plain_weights

WIDTH = 8


class Net(nn.Module):
    """Blocks with dropout off by default; `path` leaves blocks out, `fail` raises inside the third block."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, path: tuple[int, ...] = (0, 1, 2, 3, 4), fail: bool = False) -> torch.Tensor:
        for place in path:
            if fail and place == 2:
                raise KeyError("no such token")
            x = x + torch.tanh(self.dropout(self.layers[place](x)))
        return x


def data(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def one_loss(model: Any, number: int, rank: int) -> Any:
    yield model(data(number, rank)).square().mean()


def start(stage: int, model: nn.Module | None = None, **more: Any) -> Any:
    return onecopy.initialize(model=model or Net(), config=configuration(stage, **more))[0]


def step(engine: Any, number: int) -> None:
    engine.backward(next(one_loss(engine, number, engine.global_rank)))
    engine.step()


def wanted(steps: int) -> dict[str, torch.Tensor]:
    return plain_weights(Net, one_loss, dist.get_world_size(), steps)
