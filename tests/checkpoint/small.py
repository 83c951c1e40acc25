"""A small model with everything a checkpoint has to get right, and a training run of it that tests can interrupt.

Top-level functions here run on ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import onecopy

WIDTH, CLASSES = 24, 11  # nothing a multiple of 64, so that ranges and paddings fall inside parameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 37)
        self.down = nn.Linear(37, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied head, a frozen layer, buffers (one that is not saved), a scalar, an empty parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("forgotten", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(self.dropout(x))
        x = x + torch.tanh(self.frozen(x)) * self.scale.to(x.dtype)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), torch.roll(tokens, -1, 1).flatten())


def config(stage: int, precision: str = "fp32", world: int = 1, **more: Any) -> dict[str, Any]:
    """12 samples a step at every world size."""
    return {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 12 // world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}),
        **more,
    }


def make_model(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def make_engine(stage: int, precision: str = "fp32", seed: int = 0, dropout: float = 0.0, **more: Any) -> Any:
    world = torch.distributed.get_world_size()
    return onecopy.initialize(model=make_model(seed, dropout=dropout), config=config(stage, precision, world, **more))[
        0
    ]


def batch(step: int) -> torch.Tensor:
    """This rank's part of the step's 12 samples."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokens = torch.randint(0, CLASSES, (12, 5), generator=torch.Generator().manual_seed(100 + step))
    return tokens[rank * (12 // world) : (rank + 1) * (12 // world)]


def train(engine: Any, first: int, last: int) -> list[float]:
    """Steps `first` to `last - 1`; returns the mean losses over the ranks."""
    losses = []
    for step in range(first, last):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        total = engine.communicator.sum_vector(loss.detach().double().reshape(1), "loss")
        losses.append(total.item() / torch.distributed.get_world_size())
    return losses


def run_and_save(
    folder: str | Path, stage: int, precision: str, steps: int = 3, more: int = 3, **options: Any
) -> dict[str, Any]:
    """Train, save, train on; what the run lost and what it held when it was saved."""
    engine = make_engine(stage, precision, **options)
    train(engine, 0, steps)
    engine.save_checkpoint(folder, client_state={"note": "ours", "numbers": [1, 2.5]})
    held, rate = masters_of(engine), engine.get_lr()
    losses = train(engine, steps, steps + more)
    engine.destroy()
    return {"losses": losses, "held": held, "lr": rate}


def load_and_run(
    folder: str | Path,
    stage: int,
    precision: str,
    steps: int = 3,
    more: int = 3,
    before: int = 0,
    tag: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A new engine of other weights (that has stepped `before` times), loaded and trained on."""
    engine = make_engine(stage, precision, seed=7, **options)
    train(engine, 50, 50 + before)
    path, client_state = engine.load_checkpoint(folder, tag)
    held = masters_of(engine)
    result = {
        "path": path,
        "client_state": client_state,
        "held": held,
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps),
        "lr": engine.get_lr(),
        "losses": train(engine, steps, steps + more),
    }
    engine.destroy()
    return result


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's pieces of the training state, by name and range, to compare with another engine's at the same sharding."""
    from onecopy.checkpoint.pieces import model_pieces, optimizer_pieces

    pieces = [*model_pieces(engine), *optimizer_pieces(engine)[0]]
    return {f"{piece.key}[{piece.start}]": piece.data.clone() for piece in pieces}
