"""The shapes that published runs name: a model's name, however it is spelled, to what its `config.json` says of its size.

`benchmarks/data/shapes.csv` has the models that people publish runs of (from the `config.json` of each). A family that is known with
sizes that are not (a "Llama-4.2B") takes layers, width, heads and vocabulary from the run's row, and the width inside its blocks
from the row's count of parameters.
"""

from __future__ import annotations

import csv
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from onecopy.errors import PlanError

Shape = dict[str, Any]
Row = dict[str, str]
GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "olmo",
    "olmo2",
)  # three matrices inside
_SIZE = re.compile(r"\d+(\.\d+)?[bm]\d?|\d+x\d+b|small|medium|large|xl|base|mini|tiny")
_OTHER_NAMES = {"inner": {"opt": "ffn_dim"}, "width": {"gpt2": "n_embd", "gptj": "n_embd"}}
_OLD_NAMES = {"gpt2": ("n_layer", "n_head"), "gptj": ("n_layer", "n_head"), "bloom": ("n_layer", "n_head")}


class Unknown(PlanError):
    """A row that no plan can be made of; the message says why."""


def spelled(name: str) -> tuple[str, str]:
    """(family, size) of a model's name: "meta-llama/Llama-2-7b-hf", "LLaMA2 7B" and "llama2-7b" are ("llama2", "7b")."""
    words = re.findall(r"[a-z0-9.]+", name.split("/")[-1].lower())
    for place, word in enumerate(words):
        if place and _SIZE.fullmatch(word):
            return "".join(words[:place]), word
    return "".join(words), ""


def number(row: Row, name: str) -> float:
    """A row's number; 0 where the row has none there."""
    try:
        value = float(row.get(name) or 0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


@cache
def known() -> dict[str, Row]:
    """The table's rows by each of their names, "family size"."""
    with open(Path(__file__).parent / "data" / "shapes.csv", encoding="utf-8") as file:
        return {name: row for row in csv.DictReader(file) for name in (row["name"], *row["also"].split(";")) if name}


def kind_of(name: str) -> str | None:
    """The `model_type` of a model's name; None where its family is not known."""
    family, size = spelled(name)
    row = known().get(f"{family} {size}".strip())
    if row is None:  # of a family, any size is built in the same way
        row = next((row for other, row in known().items() if other.split()[0] == family), None)
    return row["type"] if row is not None else None


def shape_of(row: Row) -> Shape | None:
    """What a `config.json` of the row's model would say; None for a model whose family is not known.

    Raises:
        Unknown: the row and the model of that name disagree, or the row does not say enough of a size that is not known.
    """
    kind = kind_of(row["model"])
    if kind is None:
        return None
    found = known().get(" ".join(spelled(row["model"])).strip())
    if found is None:
        return _shape(kind, _like(row, kind))
    if number(row, "layers") not in (0, number(found, "layers")):
        raise Unknown(f"{row['model']} has {found['layers']} blocks, the row says {row['layers']}")
    return _shape(kind, found)


def _like(row: Row, kind: str) -> Row:
    """A row of the table for a size that is not in it, from the run's own numbers."""
    layers, width, vocabulary = (int(number(row, name)) for name in ("layers", "hidden", "vocab"))
    if kind in ("falcon", "mixtral") or not (layers and width and vocabulary):
        raise Unknown(f"the size of {row['model']} is not known, and the row does not say enough of it")
    inner = 4.0 * width
    if kind in GATED:
        parameters = number(row, "params")
        inner = (
            (parameters - 2 * vocabulary * width) / (3 * layers * width) - 4 * width / 3
            if parameters
            else 8 * width / 3
        )
        if not 1.5 * width < inner < 6 * width:
            raise Unknown(
                f"{row['model']} cannot have {parameters:.3g} parameters with the row's layers, width and vocabulary"
            )
        inner = round(inner / 64) * 64
    heads = int(number(row, "heads")) or width // 128
    return {
        "width": str(width), "inner": str(int(inner)), "layers": str(layers), "heads": str(heads), "vocabulary": str(vocabulary),
    }  # fmt: skip


def _shape(kind: str, size: Row) -> Shape:
    """In the words of that `model_type`."""
    layers, heads = _OLD_NAMES.get(kind, ("num_hidden_layers", "num_attention_heads"))
    width = _OTHER_NAMES["width"].get(kind, "hidden_size")
    shape: Shape = {
        "model_type": kind,
        width: int(size["width"]),
        layers: int(size["layers"]),
        heads: int(size["heads"]),
    }
    shape["vocab_size"] = int(size["vocabulary"])
    if width == "hidden_size":
        shape[_OTHER_NAMES["inner"].get(kind, "intermediate_size")] = int(size["inner"])
    if kind in GATED:
        shape["num_key_value_heads"] = int(size.get("kv_heads") or size["heads"])
        shape |= {"head_dim": int(size["head_dim"])} if size.get("head_dim") else {}
        shape |= {"tie_word_embeddings": True} if size.get("tied") else {}
    if kind == "falcon":
        new = int(size["kv_heads"]) > 1
        shape |= {
            "bias": False,
            "alibi": False,
            "parallel_attn": True,
            "multi_query": not new,
            "new_decoder_architecture": new,
        }
        shape |= {"num_kv_heads": int(size["kv_heads"])} if new else {}
    more: dict[str, Shape] = {"opt": {"word_embed_proj_dim": shape[width]}, "gptj": {"rotary_dim": 64}}
    return shape | more.get(kind, {})
