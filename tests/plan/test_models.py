"""Configurations as people find them: each is a plan of the right size, or one sentence that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.errors import PlanError
from onecopy.plan.depths import Pattern, depths_of, pattern_of
from onecopy.plan.estimate import Estimator, Setting, exact, sizes_of
from onecopy.plan.models import from_config_dict, subject_for
from tests.plan.test_exact import HIDDEN, LENGTH

pytest.importorskip("transformers")

SMALL: dict[str, dict[str, Any]] = {
    "classifier": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 203, **HIDDEN},
    "tagger": {"model_type": "bert", "architectures": ["BertForTokenClassification"], "vocab_size": 203, **HIDDEN},
    "reader": {"model_type": "bert", "architectures": ["BertForQuestionAnswering"], "vocab_size": 203, **HIDDEN},
    "whisper": {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 64, "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 8,
        "max_source_positions": 32, "max_target_positions": 64, "vocab_size": 203, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        "decoder_start_token_id": 0,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 203, "state_size": 8},
}  # fmt: skip

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v2", **HIDDEN, "vocab_size": 203, "num_hidden_layers": 2, "first_k_dense_replace": 2, "kv_lora_rank": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_task_is_rehearsed(name: str) -> None:
    import transformers

    subject = from_config_dict(SMALL[name], name)
    made = exact(subject, Setting(2, 2, 1), 2, LENGTH)
    auto = {"whisper": "AutoModelForSpeechSeq2Seq", "mamba": "AutoModelForCausalLM"}.get(name, "AutoModel")
    config = transformers.AutoConfig.for_model(**SMALL[name])
    with torch.device("meta"):
        real = getattr(transformers, auto).from_config(config)
    assert made.peak > 0 and made.numel >= 0.9 * sum(p.numel() for p in real.parameters())
    if auto != "AutoModel":
        assert made.numel == sum(p.numel() for p in real.parameters())


def test_selective_scans_are_kernels_on_an_accelerator() -> None:
    """Not a loop over tokens: what is kept grows by the kernel's inputs and results, and not by a state a token."""
    subject = from_config_dict(SMALL["mamba"], "mamba")
    peaks = [exact(subject, Setting(2, 1), 2, length).peak for length in (64, 8192)]
    inner, state = 2 * 64, 8
    assert peaks[1] - peaks[0] < 2 * (8192 - 64) * 2 * inner * (
        3 * state
    )  # of two blocks, were a state in 16 bits kept thrice a token


def test_a_loop_over_tokens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onecopy.plan.loops.MOST", 500)
    content = {
        "model_type": "rwkv",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 203,
        "context_length": 8192,
    }
    subject = from_config_dict(content, "rwkv")
    with pytest.raises(PlanError, match=r"loops over tokens in Python: rwkv\.blocks\.0\.attention .* --seq 32"):
        exact(subject, Setting(2, 1), 2, 512)
    assert exact(subject, Setting(2, 1), 2, 16).peak > 0


def test_blocks_that_differ_make_a_pattern() -> None:
    assert pattern_of([5] * 9) == Pattern() and pattern_of([7, 5, 5, 5, 5]) == Pattern(1, 1)
    assert pattern_of([1, 1, 1, 2] * 4) == Pattern(0, 4) and pattern_of([9, 1, 4, 7, 3]) == Pattern()
    assert depths_of(Pattern(0, 4), 16, 2, "none") == (4, 8) and depths_of(Pattern(1, 1), 27, 3, "full") == (4, 6)
    assert depths_of(Pattern(), 12, 2, 5) == (2, 7)


@pytest.mark.slow
def test_a_dense_first_block_is_in_both_depths() -> None:
    subject = from_config_dict({**DEEPSEEK, "num_hidden_layers": 11, "first_k_dense_replace": 1}, "small-deepseek")
    setting = Setting(3, 2)
    assert Estimator(subject, 4, LENGTH).peak(setting) == pytest.approx(
        exact(subject, setting, 4, LENGTH).peak, rel=0.002
    )


def test_attention_with_narrow_values_keeps_no_scores() -> None:
    """DeepSeek's: keys of 48 columns, values of 32; accelerators have a kernel for it."""
    subject = from_config_dict(DEEPSEEK, "small-deepseek")
    kept = exact(subject, Setting(0, 1), 2, 1024).at_peak()["activations"]
    assert kept < 2 * 4 * 1024**2 * 2  # the scores of two blocks, four heads, in 16 bits


@pytest.mark.slow
def test_two_stacks_are_as_deep_as_each_other() -> None:
    content = {"model_type": "t5", "d_model": 64, "d_ff": 96, "num_heads": 4, "d_kv": 16, "vocab_size": 203}
    subject = from_config_dict({**content, "num_layers": 9}, "t5")
    setting = Setting(2, 3, 1, "full")
    assert Estimator(subject, 4, LENGTH).peak(setting) == pytest.approx(
        exact(subject, setting, 4, LENGTH).peak, rel=0.01
    )
    assert from_config_dict({**content, "num_layers": 9, "num_decoder_layers": 3}, "t5").shrink is None


def test_what_reads_images_and_tokens_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "llava-1.5-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {}, "vision_config": {}}))
    with pytest.raises(PlanError, match="images or sound"):
        subject_for(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    assert subject_for(folder).name == subject_for(folder / "config.json").name == "llava-1.5-7b"
    assert sizes_of(subject_for(folder))[0] == 50257 * 768 + 1024 * 768 + 2 * (12 * 768**2 + 13 * 768) + 2 * 768
