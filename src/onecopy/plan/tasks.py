"""What a transformers model is trained on, by its task: the class that has its loss, and inputs of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onecopy.errors import PlanError

Inputs = dict[str, torch.Tensor]
_VISION = ("vit", "deit", "swin", "convnext", "dinov2")
_MASKED = ("bert", "roberta", "deberta-v2", "electra", "distilbert", "modernbert")
_SEQUENCE = ("t5", "mt5", "bart")
_ENDINGS = {  # of a class's name, in the configuration's `architectures`
    "MaskedLM": "masked", "SequenceClassification": "classification", "TokenClassification": "tagging", "QuestionAnswering": "answers",
    "Seq2SeqLM": "sequence", "ConditionalGeneration": "sequence", "ImageClassification": "image",
}  # fmt: skip


def task_of(content: dict[str, Any]) -> str:
    """The task of a `config.json`: what its class is for, else what its `model_type` usually is.

    Raises:
        PlanError: it reads images or sound beside tokens, which nothing here makes.
    """
    kind = str(content["model_type"])
    if "vision_config" in content or "audio_config" in content:
        raise PlanError(
            f"model_type '{kind}' reads images or sound beside tokens; plan its language model by the text_config alone, or write a "
            "function that returns (module, inputs) and name it as package.module:function"
        )
    named = " ".join(content.get("architectures") or [])
    if "num_mel_bins" in content:
        return "speech"
    for ending, task in _ENDINGS.items():
        if ending in named:
            return task
    if kind.startswith(_VISION):
        return "image"
    if named:
        return "causal"
    return "masked" if kind in _MASKED else "sequence" if kind in _SEQUENCE else "causal"


def longest_of(config: Any, task: str) -> int:
    """Tokens a sample can have; 0 where nothing says it."""
    if task == "image":
        return 0
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _tokens(config: Any, size: int, length: int) -> Inputs:
    ids = torch.randint(0, config.vocab_size, (size, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _classes(config: Any, size: int, length: int) -> Inputs:
    return {**_tokens(config, size, length), "labels": torch.zeros(size, dtype=torch.long)}


def _tags(config: Any, size: int, length: int) -> Inputs:
    return {**_tokens(config, size, length), "labels": torch.zeros(size, length, dtype=torch.long)}


def _answers(config: Any, size: int, length: int) -> Inputs:
    place = torch.zeros(size, dtype=torch.long)
    return {
        "input_ids": _tokens(config, size, length)["input_ids"],
        "start_positions": place,
        "end_positions": place.clone(),
    }


def _pixels(config: Any, size: int, length: int) -> Inputs:
    side = config.image_size
    high, wide = side if isinstance(side, list | tuple) else (side, side)
    return {
        "pixel_values": torch.randn(size, config.num_channels, high, wide),
        "labels": torch.zeros(size, dtype=torch.long),
    }


def _sound(config: Any, size: int, length: int) -> Inputs:
    frames = 2 * getattr(config, "max_source_positions", 1500)
    labels = torch.randint(0, config.vocab_size, (size, length))
    return {"input_features": torch.randn(size, config.num_mel_bins, frames), "labels": labels}


TASKS: dict[str, tuple[str, Callable[[Any, int, int], Inputs]]] = {
    "causal": ("AutoModelForCausalLM", _tokens),
    "masked": ("AutoModelForMaskedLM", _tokens),
    "sequence": ("AutoModelForSeq2SeqLM", _tokens),
    "classification": ("AutoModelForSequenceClassification", _classes),
    "tagging": ("AutoModelForTokenClassification", _tags),
    "answers": ("AutoModelForQuestionAnswering", _answers),
    "image": ("AutoModelForImageClassification", _pixels),
    "speech": ("AutoModelForSpeechSeq2Seq", _sound),
}
"""Task to (transformers' class, inputs of (configuration, samples, tokens a sample))."""
