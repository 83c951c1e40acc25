"""Whatever is written, `load` gives a configuration or one `ConfigError` that names the key path."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from onecopy.config import Config, ConfigWarning, load
from onecopy.config.keys import default_of, keys_of
from onecopy.config.kinds import Block
from onecopy.errors import ConfigError


def _full(cls: type = Config) -> dict[str, Any]:
    """A document that writes every key of the schema, with its default where that is a value JSON can hold."""
    document: dict[str, Any] = {}
    for one, key in keys_of(cls):
        if isinstance(key.kind, Block):
            document[key.name] = _full(key.kind.cls)
        else:
            value = default_of(one)
            document[key.name] = list(value) if isinstance(value, tuple) else value
    return document


FULL = _full()
FULL["fp16"].pop("initial_loss_scale")
FULL["train_batch_size"] = 8
FULL["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}}
FULL["scheduler"] = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "log"},
}


def _paths(block: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in block.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, name))


PATHS = list(_paths(FULL))
LIMITS = [
    0, 1, -1, 2, 3, 4, 0.0, -0.0, 0.5, 1.0, 1e-300, 5e8, 1e308, -1e308, float("inf"), float("-inf"), float("nan"),
    sys.maxsize, sys.maxsize + 1, -sys.maxsize, 2**127, 10**400, True, False, None, "", " ", "auto", "none", "true",
    "5e8", "NaN", "fp16", "bf16", "cpu", [], [[]], [None], ["a"], [0.9, 0.99], {}, {"enabled": True}, {"a": {"b": {}}},
    "\0", "é" * 99,
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
VALUES = st.sampled_from(LIMITS) | JSON


def _load(document: Any) -> Config | str:
    """The configuration, or the text of its error."""
    before = copy.deepcopy(document)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            config = load(document, world_size=2)
        except ConfigError as error:
            return str(error)
        finally:
            assert repr(document) == repr(before)
    assert config.train_batch_size == config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * 2
    assert config.report(every_default=True)
    assert config.compute_dtype is not None
    return config


def _block(document: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path[:-1]:
        document = document[name]
    return document


def test_the_full_document_loads_and_comes_back() -> None:
    config = _load(FULL)
    assert isinstance(config, Config), config
    assert config.zero.offload_param is not None and config.zero.stage == 0
    judged = {one.key_path for one in config.findings if one.verdict != "note"}
    leaves = {".".join(path) for path in PATHS if not isinstance(_block(FULL, path)[path[-1]], dict)}
    assert leaves <= judged


@given(path=st.sampled_from(PATHS))
def test_a_missing_key_is_a_default_or_a_named_error(path: tuple[str, ...]) -> None:
    document = copy.deepcopy(FULL)
    del _block(document, path)[path[-1]]
    result = _load(document)
    assert isinstance(result, Config) or ".".join(path) in result, result


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(PATHS), value=VALUES)
def test_any_value_of_any_key_loads_or_is_named(path: tuple[str, ...], value: Any) -> None:
    document = copy.deepcopy(FULL)
    _block(document, path)[path[-1]] = copy.deepcopy(value)
    result = _load(document)
    if isinstance(result, str):
        named = ".".join(path)
        assert named in result or any(one in result for one in _consequences(path)), result
        assert ";" in result or "did you mean" in result or "write" in result or "remove" in result, result


def _consequences(path: tuple[str, ...]) -> list[str]:
    """Keys whose own rule may refuse what another key makes of them."""
    if path[0] in ("fp16", "bf16"):
        return ["fp16.", "bf16.", "data_types.param_dtype"]
    if path[0] in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        return ["train_batch_size"]
    return ["scheduler.params"] if path == ("scheduler", "type") else []


@settings(max_examples=300)
@given(path=st.sampled_from(PATHS), place=st.integers(0, 30), letter=st.sampled_from("abz_3 "))
def test_a_misspelt_name_loads_with_a_warning_or_is_named(path: tuple[str, ...], place: int, letter: str) -> None:
    name = path[-1][: place % len(path[-1])] + letter + path[-1][place % len(path[-1]) :]
    document = copy.deepcopy(FULL)
    block = _block(document, path)
    assume(name not in block)
    block[name] = block.pop(path[-1])
    result = _load(document)
    misspelt = ".".join((*path[:-1], name))
    strict = path[0] in ("zero_optimization", "fp16", "bf16", "data_types", "torch_autocast", "onecopy")
    if strict and len(path) > 1:
        assert isinstance(result, str)
    if isinstance(result, str):
        assert misspelt in result or ".".join(path) in result or path[-1] in result, result
    else:
        assert any(one.key_path == misspelt and one.verdict == "note" for one in result.findings)


@settings(max_examples=200)
@given(document=st.dictionaries(st.sampled_from([one[0] for one in PATHS]) | st.text(max_size=12), VALUES, max_size=6))
def test_any_document_loads_or_gives_one_error(document: dict[str, Any]) -> None:
    _load(document)


@settings(max_examples=200)
@given(text=st.text(max_size=60) | st.sampled_from([json.dumps(FULL)[:n] for n in range(0, 400, 7)]))
def test_any_string_loads_or_gives_one_error(text: str) -> None:
    _load(text)
