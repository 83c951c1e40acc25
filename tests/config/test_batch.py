"""The batch-size triangle closes from every sufficient subset of keys; an error shows where each number is from."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy.config import Config, load
from onecopy.errors import ConfigError

TRAIN, MICRO, WINDOW = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
NAMES = (TRAIN, MICRO, WINDOW)
SMALL = st.integers(1, 12)


def _sizes(config: Config) -> tuple[int, int, int]:
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


@given(micro=SMALL, window=SMALL, world=st.integers(1, 8))
def test_any_sufficient_subset_gives_the_same_triangle(micro: int, window: int, world: int) -> None:
    whole = {TRAIN: micro * window * world, MICRO: micro, WINDOW: window}
    for kept in (NAMES, (TRAIN, MICRO), (TRAIN, WINDOW), (MICRO, WINDOW)):
        for missing in ({}, {name: "auto" for name in NAMES if name not in kept}):
            config = load({name: whole[name] for name in kept} | missing, world_size=world)
            assert _sizes(config) == (whole[TRAIN], micro, window)
    assert _sizes(load({MICRO: micro}, world_size=world)) == (micro * world, micro, 1)
    assert _sizes(load({TRAIN: micro * world}, world_size=world)) == (micro * world, micro, 1)


@given(values=st.tuples(SMALL, SMALL, SMALL), kept=st.sets(st.sampled_from(NAMES)), world=st.integers(1, 5))
def test_the_triangle_closes_or_the_error_names_a_key(values: Any, kept: set[str], world: int) -> None:
    document = {name: value for name, value in zip(NAMES, values) if name in kept}
    try:
        config = load(document, world_size=world)
    except ConfigError as error:
        assert TRAIN in str(error) or MICRO in str(error)
        assert "write" in str(error) or "set" in str(error)
    else:
        train, micro, window = _sizes(config)
        assert train == micro * window * world
        assert all(getattr(config, name) == value for name, value in document.items())


def test_a_mismatch_shows_the_source_of_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load({TRAIN: 8, MICRO: 2, WINDOW: 2}).world_size == 2
    with pytest.raises(ConfigError) as caught:
        load({TRAIN: 9, MICRO: 2, WINDOW: 2})
    text = str(caught.value)
    assert "world size 2 (environment variable WORLD_SIZE)" in text
    assert "train_micro_batch_size_per_gpu 2 (written)" in text
    assert "set train_batch_size to 8" in text


def test_world_size_one_at_parse_time_suggests_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"so one process.*run with world size 4"):
        load({TRAIN: 16, MICRO: 2, WINDOW: 2})


def test_a_remainder_is_said_with_the_nearest_values() -> None:
    with pytest.raises(ConfigError, match=r"cannot be divided by .* = 6; set train_batch_size to 6 or 12"):
        load({TRAIN: 8, WINDOW: 3}, world_size=2)


@pytest.mark.parametrize("document", [{}, {WINDOW: 4}, {TRAIN: None}, {TRAIN: "auto", MICRO: "auto", WINDOW: "auto"}])
def test_too_few_keys_ask_for_one(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu.*train_batch_size.* as an integer"):
        load(document, world_size=2)


@pytest.mark.parametrize(
    ("name", "value"), list(itertools.product(NAMES, [0, -1, 1.5, True, "8", [8], {}, float("nan"), float("inf")]))
)
def test_wrong_values_name_the_key(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = .*integer") as caught:
        load({TRAIN: 8, MICRO: 8, name: value}, world_size=1)
    assert "problems" not in str(caught.value)


@pytest.mark.parametrize("world", [0, -2, 1.5, True, "2"])
def test_a_wrong_world_size_is_refused(world: object) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        load({TRAIN: 8}, world_size=world)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "two", "-1", "1.5"])
def test_a_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        load({TRAIN: 8})


def test_the_process_group_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    config = load({TRAIN: 4})
    assert (config.world_size, config.world_size_source) == (2, "the process group")
    assert load({TRAIN: 4}, world_size=1).world_size == 1
