"""The small GPT: causal, of the published size, and able to continue a text."""

from __future__ import annotations

import math

import pytest
import torch

from onecopy.train.model import GPT, GPTConfig, parameter_groups

SMALL = GPTConfig(vocabulary_size=11, context=8, layers=2, heads=2, width=16)


def test_the_default_shape_has_nanogpts_size() -> None:
    model = GPT(GPTConfig(vocabulary_size=65))
    # 4 blocks of 12 x 128^2 and two norms, the embeddings of 65 tokens and 64 positions, and the last norm.
    assert sum(p.numel() for p in model.parameters()) == 4 * (12 * 128**2 + 2 * 128) + (65 + 64) * 128 + 128


def test_an_untrained_model_is_near_uniform() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, 8))
    loss = GPT(SMALL)(tokens, tokens.roll(-1, 1))
    assert loss.item() == pytest.approx(math.log(11), abs=0.5)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_tied_and_untied_heads() -> None:
    tied, untied = GPT(SMALL), GPT(GPTConfig(**{**_shape(), "tied": False}))
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight


def _shape() -> dict[str, int]:
    return {"vocabulary_size": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}


def test_generating_is_repeatable_and_slides_past_the_context() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    prompt = torch.tensor([[1, 2]])
    first = model.generate(prompt, 12, top_k=5, generator=torch.Generator().manual_seed(3))
    second = model.generate(prompt, 12, top_k=5, generator=torch.Generator().manual_seed(3))
    assert first.shape == (1, 14) and torch.equal(first, second) and torch.equal(first[:, :2], prompt)
    assert torch.equal(model.generate(prompt, 3, temperature=0), model.generate(prompt, 3, top_k=1))


def test_only_matrices_decay() -> None:
    model = GPT(GPTConfig(**_shape(), bias=True))
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="width 16 is not a multiple of its 3 heads"):
        GPTConfig(vocabulary_size=11, heads=3, width=16)
    with pytest.raises(ValueError, match="layers is 0"):
        GPTConfig(vocabulary_size=11, layers=0)
    with pytest.raises(ValueError, match="9 tokens does not fit the model's context of 8"):
        GPT(SMALL)(torch.zeros(1, 9, dtype=torch.int64))
