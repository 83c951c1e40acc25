"""The models of published runs as they were run: the loss, attention, dropout and recomputation of the program that ran them.

program              what it does differently from `onecopy.train.model.GPT`, and where that is written
llm-foundry          cross entropy of bf16 logits in one kernel that keeps them and one number a token (`loss_fn`'s default
                     'fused_crossentropy', models/mpt/modeling_mpt.py; benchmarking/submit_benchmarks.py sets low-precision layer norms)
Megatron-DeepSpeed   attention scores, probabilities and a dropped-out copy in memory, dropout of 0.1 (Megatron's defaults, which
                     the run's script tr3m-1B3-emb-norm-pile.slurm leaves), biases
torchtitan           Llama; "selective-op" keeps attention and every second matrix product of a block (its activation_checkpoint.py)
others               Llama where the name says so, else GPT; torch's cross entropy of fp32 logits
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from onecopy.engine.whereabouts import repeated_blocks
from onecopy.plan.estimate import Estimator, Setting
from onecopy.plan.models import from_config_dict
from onecopy.plan.presets import PRESETS
from onecopy.plan.rehearsal import Subject
from onecopy.plan.unseen import Unseen
from onecopy.train.model import GPT, GPTConfig

Row = dict[str, str]
LLAMA = {
    "llama2-7b": "llama-7b", "llama2-13b": "llama-13b", "llama2-70b": "llama-70b", "llama3-8b": "llama3-8b", "llama3.1-8b": "llama3-8b",
    "llama3-70b": "llama3-70b", "llama3.1-70b": "llama3-70b", "llama3.1-405b": "llama3-405b",
}  # fmt: skip
OTHER_LLAMA = {  # Code Llama's shape, which IBM's 34B has too
    "llama2-34b": {**PRESETS["llama-70b"], "num_hidden_layers": 48, "intermediate_size": 22016},
}


def subject(row: Row) -> Subject:
    """What a row's program ran, ready to rehearse."""
    name = row["model"].split()[0].lower()
    if name in LLAMA or name in OTHER_LLAMA:
        shape = OTHER_LLAMA.get(name) or PRESETS[LLAMA[name]]
        found = from_config_dict({**shape, "max_position_embeddings": int(row["seq"])}, row["model"])
        return _recomputing(found) if row["act_ckpt"] == "selective-op" and "torchtitan" in row["framework"] else found
    if row["framework"].startswith("Megatron"):
        return _gpt(row, _megatron)
    return _gpt(row, GPT)


def _gpt(row: Row, make: Callable[[GPTConfig], nn.Module], layers: int | None = None) -> Subject:
    """Four times as wide inside, learned positions, head and embedding one weight."""
    vocabulary, sequence, width = int(row["vocab"]), int(row["seq"]), int(row["hidden"])
    shape = GPTConfig(vocabulary, sequence, layers or int(row["layers"]), int(row["heads"] or width // 128), width)
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
def fsdp_pools(row: Row, estimator: Estimator, setting: Setting) -> Unseen:
    """What torch's FSDP reserves and this engine does not, in bytes.

    A stream's memory is cached for that stream alone (torch's caching allocator). FSDP reduces in one of its own: fp32 gradients of
    a whole unit go in, fp32 shards come out and live until the optimizer's step (`foreach_reduce` in _fsdp_collectives.py), so at
    the activations' peak both lie there unused. The root's unit, embedding and head, is the largest and stays whole until its
    backward; here an untied embedding gives its slot up.
    """
    parameters, _ = estimator.sizes()
    embedding = int(row["vocab"]) * int(row["hidden"])
    untied = row["model"].startswith("Llama")
    reduced = 4 * embedding * (2 if untied else 1) + 4 * parameters // estimator.world_size
    here = estimator.state(setting)["gradients"]
    extra = max(0, reduced - here) + (2 * embedding if untied else 0)
    return Unseen("FSDP's own streams", extra, extra, "torch's FSDP and caching allocator", "-", "reserved")


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
