"""The yardstick: one Llama-type model, one stream of random tokens, one AdamW, whatever engine trains it."""

import argparse

import torch
from torch import nn

LEARNING_RATE, BETAS, EPSILON, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.01, 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=128, help="tokens")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")


def make_model(arguments: argparse.Namespace) -> nn.Module:
    """The same fp32 weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden = arguments.hidden
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=hidden // 64,
        vocab_size=arguments.vocabulary,
        max_position_embeddings=arguments.sequence,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches(arguments: argparse.Namespace, rank: int, count: int) -> list[torch.Tensor]:
    """`count` micro-batches [sequences, tokens], different on every rank."""
    generator = torch.Generator().manual_seed(1234 + rank)
    shape = (arguments.micro_batch, arguments.sequence)
    return [torch.randint(0, arguments.vocabulary, shape, generator=generator) for _ in range(count)]
