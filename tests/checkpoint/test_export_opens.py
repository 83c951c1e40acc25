"""Exported folders open in the libraries people use: transformers' own loader gives the trained model back, with no step between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model

import onecopy
from onecopy.checkpoint import export

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(12).reshape(2, 6)


def make_llama(tied: bool, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train_and_write(folder: str, tied: bool) -> torch.Tensor:
    """One step, a checkpoint, both kinds of live 16-bit folders; the trained model's logits."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    engine = onecopy.initialize(model=make_llama(tied), config=settings)[0]
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
    engine.step()
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(f"{folder}/bin") and engine.save_16bit_model(f"{folder}/safe", "model.safetensors")
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=TOKENS).logits
    engine.destroy()
    return logits


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_opens_every_export(world2, tmp_path: Path, tied: bool) -> None:
    logits = world2.run(train_and_write, str(tmp_path), tied)[0]
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).write_text("{}")
    export(tmp_path, tmp_path / "whole", "bf16", model_folder=tmp_path / "tokenizer")
    export(tmp_path, tmp_path / "shards", "bf16", max_shard_size="4KB")
    export(tmp_path, tmp_path / "torch", "as-trained", name="pytorch_model.bin")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "whole" / "tokenizer.json").is_file()
    for name in ("whole", "shards", "torch", "bin", "safe"):
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
        )
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (name, told)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        with torch.no_grad():
            assert torch.equal(model.eval()(input_ids=TOKENS).logits, logits), name
    with safe_open(
        tmp_path / "whole" / "model.safetensors", "pt"
    ) as file:  # what vLLM's loader reads: names and tensors
        names = set(file.keys())
        assert file.metadata()["format"] == "pt" and ("lm_head.weight" in names) != tied
        assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in names)
    plain = make_llama(tied, seed=1).to(torch.bfloat16)
    load_model(plain, tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    plain = make_llama(tied, seed=2).to(torch.bfloat16)
    plain.load_state_dict(torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True))
