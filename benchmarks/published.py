"""The models of published runs as they were run: the loss, attention, dropout and recomputation of the program that ran them.

program              what it does differently from `onecopy.train.model.GPT`, and where that is written
llm-foundry          cross entropy of bf16 logits in one kernel that keeps them and one number a token (`loss_fn`'s default
                     'fused_crossentropy', models/mpt/modeling_mpt.py; benchmarking/submit_benchmarks.py sets low-precision layer norms)
Megatron-DeepSpeed   attention scores, probabilities and a dropped-out copy in memory, dropout of 0.1 (Megatron's defaults, which
                     the run's script tr3m-1B3-emb-norm-pile.slurm leaves), biases
torchtitan           Llama; "selective-op" keeps attention and every second matrix product of a block (its activation_checkpoint.py)
others               transformers' model of that name (`benchmarks/shapes.py`), else GPT; torch's cross entropy of fp32 logits
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.shapes import GATED, Unknown, kind_of, number, shape_of
from benchmarks.shapes import Row as Row
from onecopy.engine.whereabouts import repeated_blocks
from onecopy.plan.estimate import Estimator, Setting, sizes_of
from onecopy.plan.models import from_config_dict
from onecopy.plan.rehearsal import Subject
from onecopy.plan.tape import Tape
from onecopy.plan.unseen import Unseen
from onecopy.train.model import GPT, GPTConfig


def subject(row: Row) -> Subject:
    """What a row's program ran, ready to rehearse.

    Raises:
        Unknown: the model is not known, or cannot have so many parameters as the row says.
    """
    keys = ("model", "params", "layers", "hidden", "heads", "vocab", "seq", "framework", "act_ckpt")
    return _subject(tuple((key, row.get(key) or "") for key in keys))


@cache
def _subject(items: tuple[tuple[str, str], ...]) -> Subject:
    row = dict(items)
    found = _built(row)
    said, (has, _) = number(row, "params"), sizes_of(found)
    if said and abs(has / said - 1) > 0.05:
        raise Unknown(
            f"{row['model']} as it is known here has {has / 1e9:.2f}e9 parameters, the row says {said / 1e9:.2f}e9"
        )
    return found


def _built(row: Row) -> Subject:
    if row["framework"].startswith("Megatron") and kind_of(row["model"]) not in GATED:
        return _gpt(row, _megatron)
    shape = None if row["model"].startswith("MPT") else shape_of(row)
    if shape is None:
        return _gpt(row, GPT)
    length = int(number(row, "seq"))
    longest = max(length, shape.get("max_position_embeddings", 0)) if shape["model_type"] != "llama" else length
    found = from_config_dict({**shape, "max_position_embeddings": longest, "n_positions": longest}, row["model"])
    return _recomputing(found) if row["act_ckpt"] == "selective-op" and "torchtitan" in row["framework"] else found


def _gpt(row: Row, make: Callable[[GPTConfig], nn.Module], layers: int | None = None) -> Subject:
    """Four times as wide inside, learned positions, head and embedding one weight."""
    vocabulary, sequence, width, deep = (int(number(row, name)) for name in ("vocab", "seq", "hidden", "layers"))
    if not (vocabulary and sequence and width and deep):
        raise Unknown(f"{row['model']} is no known model, and the row lacks vocab, seq, hidden or layers")
    heads = int(number(row, "heads")) or width // 128
    if width % max(1, heads):
        raise Unknown(f"{row['model']}: a width of {width} is not shared equally by {heads} heads")
    shape = GPTConfig(vocabulary, sequence, layers or deep, heads, width)
    fused = row["model"].startswith("MPT")
    labels: dict[str, Tensor] = {}

    def batch(size: int, length: int) -> dict[str, Any]:
        labels["targets"] = torch.zeros(size, length, dtype=torch.long)
        tokens = {"tokens": torch.zeros(size, length, dtype=torch.long)}
        return tokens if fused else {**tokens, **labels}

    def loss(output: Tensor) -> Tensor:
        return fused_cross_entropy(output, labels["targets"]) if fused else output

    return Subject(
        row["model"], lambda: make(shape), batch, loss, sequence,
        layers=shape.layers, shrink=lambda fewer: _gpt(row, make, fewer),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ llm-foundry
class _FusedCrossEntropy(torch.autograd.Function):
    """Memory and passes of flash-attn's kernel: it keeps the 16-bit logits and a number a row, its gradient is in 16 bits too."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor) -> Tensor:
        normaliser = torch.logsumexp(logits, dim=-1).float()
        context.save_for_backward(logits, normaliser, targets)
        picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (normaliser - picked).mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        logits, normaliser, _ = context.saved_tensors
        return torch.sub(logits, normaliser.to(logits.dtype).unsqueeze(-1)), None


def fused_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    result: Tensor = _FusedCrossEntropy.apply(logits.flatten(0, 1), targets.flatten())
    return result


# ------------------------------------------------------------------------------------------------------------ Megatron
class _UnfusedAttention(nn.Module):
    """Megatron's attention of 2021: scores, their fused softmax, and what dropout leaves, each in memory."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)
        self.attention_dropout, self.output_dropout = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).split(width, dim=2)
        queries, keys, values = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        scores = (queries @ keys.transpose(-2, -1)).mul_(1 / math.sqrt(width // self.heads))
        probabilities = self.attention_dropout(torch.softmax(scores, dim=-1))
        mixed = (probabilities @ values).transpose(1, 2).reshape(batch, length, width)
        result: Tensor = self.output_dropout(self.output(mixed))
        return result


def _megatron(shape: GPTConfig) -> nn.Module:
    model = GPT(replace(shape, dropout=0.1, bias=True))
    for block in model.blocks:
        block.attention = _UnfusedAttention(shape)
    return model


# ------------------------------------------------------------------------------------------------------------ torchtitan
def _recomputing(one: Subject) -> Subject:
    """With blocks that keep attention and every second matrix product, and compute the rest again."""

    def build() -> nn.Module:
        model = one.build()
        for block in repeated_blocks(model).values():
            block.forward = _every_second_product(block.forward)  # type: ignore[method-assign]
        return model

    shrink = one.shrink
    assert shrink is not None
    return replace(one, build=build, shrink=lambda layers: _recomputing(shrink(layers)))


def _every_second_product(forward: Callable[..., Any]) -> Callable[..., Any]:
    def contexts() -> Any:
        counts = {True: 0, False: 0}  # by whether it is the recomputation

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = "scaled_dot_product" in str(op)
            if op is torch.ops.aten.mm.default:
                counts[context.is_recompute] += 1
                kept = counts[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


# ------------------------------------------------------------------------------------------------------------ engines
def fsdp_pools(row: Row, estimator: Estimator, setting: Setting, pure: bool = False) -> Unseen:
    """What torch's FSDP reserves and this engine does not, in bytes.

    A stream's memory is cached for that stream alone (torch's caching allocator). FSDP reduces in one of its own: gradients of
    a whole unit go in, in fp32 or as they are (`pure`), shards come out and live until the optimizer's step (`foreach_reduce` in
    _fsdp_collectives.py), so at the activations' peak both lie there unused. The root's unit, embedding and head, is the largest and
    stays whole until its backward; here an untied embedding gives its slot up.
    """
    parameters, _ = estimator.sizes()
    embedding, tied = embedding_of(row)
    width = 2 if pure else 4  # bytes
    reduced = width * embedding * (1 if tied else 2) + width * parameters // estimator.world_size
    here = estimator.state(setting)["gradients"]
    if reduced - here > 0.02 * estimator.peak(
        setting
    ):  # else it decides nothing; gradients at the peak are those of the pool
        here = max(
            here,
            estimator.whole(replace(setting, accumulation=min(2, setting.accumulation)), Tape()).at_peak()["gradients"],
        )
    extra = max(0, reduced - here) + (0 if tied else 2 * embedding)
    return Unseen("FSDP's own streams", extra, extra, "torch's FSDP and caching allocator", "-", "reserved")


def embedding_of(row: Row) -> tuple[int, bool]:
    """(elements of the embedding, whether the head is the same weight) of a row's model."""
    gpt = row["framework"].startswith("Megatron") or row["model"].startswith("MPT")
    shape = None if gpt and kind_of(row["model"]) not in GATED else shape_of(row)
    if shape is None:
        return int(number(row, "vocab") * number(row, "hidden")), True
    untied = kind_of(row["model"]) in GATED or shape["model_type"] in ("gpt_neox", "gptj", "phi")
    tied = shape.get("tie_word_embeddings", not untied or shape["model_type"].startswith("gemma"))
    return shape["vocab_size"] * shape.get("hidden_size", shape.get("n_embd", 0)), tied


def document(row: Row) -> dict[str, Any]:
    """What else a configuration says: FSDP reduces gradients in fp32 unless all is in 16 bits ("PURE", IBM's policy)."""
    in_fp32 = row["precision"].startswith("amp_") or "torchtitan" in row["framework"]
    return {"communication_data_type": "fp32"} if in_fp32 else {}


def stage_of(row: Row) -> int:
    """The ZeRO stage; FSDP's SHARD_GRAD_OP counts as 2."""
    return int(row["zero_stage"][:1] or 3)


def is_compiled(row: Row) -> bool:
    """Whether the program ran under torch.compile, as its precision or notes say."""
    return "compile" in row["precision"] or "torch.compile" in row["notes"]


def node_network(row: Row) -> float | None:
    """Bytes per second of a node's network cards, where the row says so ("400Gbps": of a node)."""
    found = re.fullmatch(r"(\d+)Gbps", row["interconnect"])
    return float(found[1]) / 8 * 1e9 if found else None
