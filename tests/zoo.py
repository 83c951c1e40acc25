"""Small models with everything that breaks sharded training: odd sizes, ties, reuse, unused, frozen, empty and scalar
parameters, mixed dtypes, branches by micro-batch or rank; each described by a `Shape` that can be sent to ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

ROWS = 3  # of one micro-batch on one rank


@dataclass(frozen=True)
class Shape:
    """What a model is made of.

    Attributes:
        width: features of every block.
        blocks: kinds of blocks, in order; see `KINDS`.
        container: "list" (an `nn.ModuleList`), "sequence" (an `nn.Sequential`) or "flat" (children of the model).
        tied: the head's weight is the stem's.
        reused: the first block is applied once more at the end.
        outside: the model itself reads a parameter of its first block.
        root: a parameter of the model itself has as many elements as a block.
    """

    width: int = 5
    blocks: tuple[str, ...] = ("linear", "norm", "linear")
    container: str = "list"
    tied: bool = False
    reused: bool = False
    outside: bool = False
    root: bool = False
    seed: int = 0


class Block(nn.Module):
    """x + tanh(what its kind computes), in the dtype of its weights; takes and gives float32 [rows, width]."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        inner = 71 if kind == "wide" else width
        self.linear = nn.Linear(width, inner, bias=kind != "scalar")
        if kind == "wide":
            self.back = nn.Linear(inner, width, bias=False)
        elif kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.7))
        elif kind == "empty":
            self.empty = nn.Parameter(torch.empty(0, width))
        elif kind in ("branches", "unused", "alternate"):
            self.other = nn.Linear(width, width)
        elif kind == "nested":
            self.inner = nn.ModuleList(Block("linear", width) for _ in range(2))
        elif kind == "adapter":
            self.down, self.up = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)
            self.linear.requires_grad_(False)
        elif kind == "frozen":
            self.requires_grad_(False)
        elif kind == "bfloat16":
            self.to(torch.bfloat16)
        elif kind == "double":
            self.to(torch.float64)

    def forward(self, x: torch.Tensor, micro: int, rank: int) -> torch.Tensor:
        return x + torch.tanh(self._compute(x.to(self.linear.weight.dtype), micro, rank).float())

    def _compute(self, x: torch.Tensor, micro: int, rank: int) -> torch.Tensor:
        match self.kind:
            case "wide":
                return self.back(torch.relu(self.linear(x)))
            case "norm":
                return self.linear(self.norm(x))
            case "scalar":
                return self.linear(x) * self.scale
            case "empty":
                return self.linear(x) + functional.linear(x, self.empty).sum(dim=-1, keepdim=True)
            case "branches":
                return self.linear(x) if (micro + rank) % 2 == 0 else self.other(x)
            case "alternate":
                return self.linear(x) + self.other(x) if micro % 2 == 0 else self.linear(x)
            case "nested":
                for block in self.inner:
                    x = block(x.float(), micro, rank).to(x.dtype)
                return self.linear(x)
            case "adapter":
                return self.linear(x) + self.up(self.down(x))
            case _:
                return self.linear(x)


KINDS = (
    "linear", "wide", "norm", "scalar", "empty", "branches", "unused", "alternate", "nested", "adapter", "frozen",
    "bfloat16", "double",
)  # fmt: skip
DIFFERENT_ON_RANKS = ("branches",)  # what a rank uses depends on the rank: one unit must hold all of it


class Zoo(nn.Module):
    """The model that a `Shape` describes; `forward(x [rows, width], micro, rank)` gives [rows, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(shape.seed)
        self.shape = shape
        blocks = [Block(kind, shape.width) for kind in shape.blocks]
        self.stem = nn.Linear(shape.width, shape.width)
        if shape.container == "flat":
            for place, block in enumerate(blocks):
                self.add_module(f"block{place}", block)
            self._names = [f"block{place}" for place in range(len(blocks))]
        else:
            self.blocks = nn.ModuleList(blocks) if shape.container == "list" else nn.Sequential(*blocks)
        self.head = nn.Linear(shape.width, shape.width)
        if shape.tied:
            self.head.weight = self.stem.weight
        if shape.root:
            self.root = nn.Parameter(torch.randn(shape.width, shape.width) / shape.width)
        self.register_buffer("shift", torch.linspace(-1, 1, shape.width))

    def body(self) -> list[nn.Module]:
        if self.shape.container == "flat":
            return [getattr(self, name) for name in self._names]
        return list(self.blocks)

    def forward(self, x: torch.Tensor, micro: int = 0, rank: int = 0) -> torch.Tensor:
        body = self.body()
        x = self.stem(x.to(self.stem.weight.dtype)).float() + self.shift
        for block in body + (body[:1] if self.shape.reused else []):
            x = block(x, micro, rank)
        if self.shape.outside and body:
            x = x + body[0].linear.weight.float().mean(dim=0).mean()
        if self.shape.root:
            x = x + torch.tanh(x.to(self.root.dtype) @ self.root).float()
        return self.head(x.to(self.head.weight.dtype)).float()


def batch(shape: Shape, window: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [rows, width] of one micro-batch, a function of the numbers alone."""
    generator = torch.Generator().manual_seed(1000 * window + 100 * micro + rank + 7 * shape.seed)
    return tuple(torch.randn(2, ROWS, shape.width, generator=generator))  # type: ignore[return-value]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()
