"""A small language model of blocks with dropout, and a few steps of it: what the tests of recomputed activations share."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import onecopy

WIDTH, WORDS, TOKENS = 16, 32, 6


class Block(nn.Module):
    """x + what an attention and a wide layer compute; `scale` may be a keyword, a result may be a tuple."""

    def __init__(self, dropout: float, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, None]:
        batch, length, _ = x.shape
        parts = self.mixed(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.dropout(mixed.transpose(1, 2).reshape(batch, length, WIDTH)) * scale
        return x + self.dropout(self.back(functional.gelu(self.wide(x)))), None


class LanguageModel(nn.Module):
    """Embedding, blocks, head; `frozen` trains only the small adapters beside the blocks' last layers, as LoRA does."""

    def __init__(self, blocks: int = 4, dropout: float = 0.1, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)
        if frozen:
            self.requires_grad_(False)
            for block in self.layers:
                block.back = Adapted(block.back)  # type: ignore[arg-type]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.layers:
            x, _ = block(x, scale=0.5)
        return self.head(x)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def document(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
        "bf16": {"enabled": precision == "bf16"},
        **more,
    }


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(10 * number + rank))
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def steps(engine: Any, count: int = 3, micro_batches: int = 1) -> list[float]:
    """Losses of `count` steps; the dropout of all engines draws the same."""
    torch.manual_seed(1)
    losses = []
    for number in range(count):
        for micro in range(micro_batches):
            loss = loss_of(engine, number + 100 * micro, torch.distributed.get_rank())
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
    return losses


def result(engine: Any, losses: list[float]) -> tuple[list[float], float | None, str]:
    """Losses, the last norm, and a hash of all masters: what must be the same bits."""
    digest = hashlib.sha256()
    for _, parameter in sorted(engine.module.named_parameters()):
        whole = onecopy.utils.safe_get_full_fp32_param(parameter)
        digest.update(whole.detach().double().numpy().tobytes())
    return losses, engine.get_global_grad_norm(), digest.hexdigest()
