"""A small GPT: pre-norm blocks of causal attention and a feed-forward network over learned positions.

Nothing in it knows about sharding; the engine finds its units by itself, one a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The model's shape. `context` is the longest sequence in tokens; `tied`: embedding and head are one weight."""

    vocabulary_size: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    bias: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "context", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"the model's {name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"the model's width {self.width} is not a multiple of its {self.heads} heads")


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.output = nn.Linear(config.width, config.width, bias=config.bias)
        self.output_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).split(width, dim=2)
        queries, keys, values = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.output_dropout(self.output(mixed))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        return self.dropout(self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens in, next-token logits or loss out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        # 0.0625 at width 128 and 0.026 at 768: as each layer's inputs grow in number, its weights start smaller.
        deviation = 1 / math.sqrt(2 * config.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            # Each block adds two terms to the residual stream; the scale keeps the sum's variance independent of depth.
            if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                nn.init.normal_(parameter, std=deviation / math.sqrt(2 * config.layers))
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocabulary] of `tokens` [batch, length], or their mean loss against `targets`.

        Raises ValueError when the sequence is longer than the model's context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"a sequence of {length} tokens does not fit the model's context of {self.config.context}")
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `tokens` [batch, length] by `count` sampled tokens; `temperature` 0 takes the likeliest each time.

        Under sharding every rank must call it, with the same tokens, and with generators of the same state to agree.
        """
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1].float()
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None and top_k < logits.shape[-1]:
                    least = logits.topk(top_k, dim=-1).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                chosen = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups that decay matrices only, and neither norms nor biases."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
