"""transformers' models: from_pretrained under ZeRO-3, resized embeddings, meta-device loading, generation in step."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import onecopy
from onecopy.integrations.deepspeed import install, uninstall
from tests.reference import configuration
from tests.worlds import World

pytest.importorskip("transformers")


def small_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )


def plain_model() -> Any:
    from transformers import LlamaForCausalLM, set_seed

    set_seed(0)
    return LlamaForCausalLM(small_config()).eval()


def rows() -> torch.Tensor:
    return torch.randint(2, 32, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    with onecopy.zero.GatheredParameters(list(model.parameters())):
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name  # rotary tables among them


def construct(folder: str) -> None:
    assert install(force=True)
    import deepspeed
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, set_seed
    from transformers.integrations import HfDeepSpeedConfig

    plain, tokens = plain_model(), rows()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder, max_shard_size="40KB")
    dist.barrier()
    document = {**configuration(3), "bf16": {"enabled": False}}
    keep = HfDeepSpeedConfig(document)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(hasattr(parameter, "ds_id") and parameter.shape == (0,) for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, plain)
    reference = copy.deepcopy(model).eval()  # a model that no engine gets
    model.resize_token_embeddings(40)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    engine, *_ = deepspeed.initialize(model=model, config=document)
    with torch.no_grad():
        wanted = plain(input_ids=tokens).logits
        assert torch.equal(engine(input_ids=tokens).logits[..., :32], wanted)
        assert torch.equal(reference(input_ids=tokens).logits, wanted)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    with deepspeed.zero.unwrap_model_for_generation(engine) as whole, torch.no_grad():
        for _ in range(1 + dist.get_rank()):  # each rank as often as it likes
            whole.module(input_ids=tokens)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.destroy()
    del keep
    gc.collect()
    set_seed(5)
    with deepspeed.zero.Init(config_dict_or_path=document):  # a plain script's way, without transformers' own
        built = LlamaForCausalLM(small_config())
    set_seed(5)
    assert_same(built, LlamaForCausalLM(small_config()))
    with deepspeed.zero.Init():
        half = nn.Linear(10, 10)
    assert half.weight.ds_tensor.dtype == torch.float16  # DeepSpeed's default without a configuration
    uninstall()


def test_from_pretrained_resize_and_generation_under_zero3(world2: World, tmp_path: Path) -> None:
    world2.run(construct, str(tmp_path))


def load_and_generate(folder: str) -> None:
    from transformers import LlamaForCausalLM

    plain, tokens = plain_model(), rows()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder, max_shard_size="40KB")
    dist.barrier()
    wanted = plain(input_ids=tokens).logits.detach()
    with torch.device("meta"):
        model = LlamaForCausalLM(small_config())
    engine = onecopy.init_inference(model, dtype=torch.float32, checkpoint=folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(engine(input_ids=tokens).logits, wanted)
    length = 10 + 6 * dist.get_rank()
    for more in ({}, {"num_beams": 2}):
        ours = engine.generate(input_ids=tokens, max_length=length, do_sample=False, **more)
        assert torch.equal(ours, plain.generate(input_ids=tokens, max_length=length, do_sample=False, **more))
    engine.destroy()
    with torch.device("meta"):
        headless = LlamaForCausalLM(small_config()).model
    onecopy.load_pretrained(headless, folder)  # the base model, from the files of the model with a head
    with torch.no_grad():
        assert torch.equal(
            headless(input_ids=tokens).last_hidden_state, plain.model(input_ids=tokens).last_hidden_state
        )


def test_a_meta_model_is_loaded_and_generates_to_each_ranks_own_length(world2: World, tmp_path: Path) -> None:
    world2.run(load_and_generate, str(tmp_path))


def converted_models() -> list[tuple[str, Any, Any]]:
    """Models whose files have other names or another layout: experts one by one, a prefix, names of before LayerNorm.weight."""
    from transformers import BertConfig, BertForMaskedLM, MixtralConfig, MixtralForCausalLM

    size = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return [
        ("experts", MixtralForCausalLM, MixtralConfig(**size, num_key_value_heads=1, num_local_experts=3)),
        ("old", BertForMaskedLM, BertConfig(**size, max_position_embeddings=16)),
    ]


def load_other_names(folder: str) -> None:
    for name, kind, config in converted_models():
        theirs = kind.from_pretrained(Path(folder) / name).eval()
        tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(1))
        with torch.device("meta"):
            model, late = kind(config), kind(config)
        found = onecopy.load_pretrained(model, Path(folder) / name)
        assert found.missing == found.unexpected == ()
        assert_same(model, theirs)
        engine, *_ = onecopy.initialize(model=late, config=configuration(3))
        onecopy.load_pretrained(engine, Path(folder) / name)
        with torch.no_grad():
            assert torch.equal(engine.eval()(input_ids=tokens).logits, theirs(input_ids=tokens).logits), name
        engine.destroy()
        assert [repr(kept) for kept in late._weight_conversions] == [repr(kept) for kept in theirs._weight_conversions]


def test_names_and_layouts_are_changed_as_from_pretrained_changes_them(world2: World, tmp_path: Path) -> None:
    for name, kind, config in converted_models():
        model = kind(config)
        model.save_pretrained(tmp_path / name)
        if name == "experts":
            assert any(".experts.2.w1." in key for key in load_file(tmp_path / name / "model.safetensors"))
        else:
            (tmp_path / name / "model.safetensors").unlink()
            older = {
                key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
                for key, value in model.state_dict().items()
            }
            torch.save(older, tmp_path / name / "pytorch_model.bin")
    world2.run(load_other_names, str(tmp_path))
