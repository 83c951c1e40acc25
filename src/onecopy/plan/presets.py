"""Published model shapes by name: each is the `config.json` of the model, cut down to what decides its size."""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": context,
    }  # fmt: skip


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": 50257,
        "n_positions": 1024,
    }


def _opt(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "ffn_dim": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden,
    }  # fmt: skip


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, kv: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "head_dim": 128,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(4096, 11008, 32, 32, 32, 32000, 2048),
    "llama-13b": _llama(5120, 13824, 40, 40, 40, 32000, 2048),
    "llama-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
    "llama3-8b": _llama(4096, 14336, 32, 32, 8, 128256, 8192),
    "llama3-70b": _llama(8192, 28672, 80, 64, 8, 128256, 8192),
    "llama3-405b": _llama(16384, 53248, 126, 128, 8, 128256, 8192),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "opt-125m": _opt(768, 3072, 12, 12),
    "opt-1.3b": _opt(2048, 8192, 24, 32),
    "opt-2.7b": _opt(2560, 10240, 32, 32),
    "opt-6.7b": _opt(4096, 16384, 32, 32),
    "opt-13b": _opt(5120, 20480, 40, 40),
    "opt-30b": _opt(7168, 28672, 48, 56),
    "opt-66b": _opt(9216, 36864, 64, 72),
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8, False),
}  # fmt: skip
