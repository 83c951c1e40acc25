"""A run's settings: overrides of the configuration, and what `--resume` keeps."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from onecopy.cli.train import add_arguments, settings_from
from onecopy.config import load
from onecopy.errors import ConfigError, OneCopyError
from onecopy.train.settings import RECIPE, Settings, override


def parsed(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = settings_from(parser.parse_args(words))
    assert isinstance(settings, Settings)
    return settings


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("zero_optimization.stage=2", {"zero_optimization": {"stage": 2}}),
        ("optimizer.params.lr=1e-3", {"optimizer": {"params": {"lr": 0.001}}}),
        ("optimizer.type=SGD", {"optimizer": {"type": "SGD"}}),
        ("bf16.enabled=true", {"bf16": {"enabled": True}}),
        ("optimizer.params.betas=[0.9, 0.95]", {"optimizer": {"params": {"betas": [0.9, 0.95]}}}),
    ],
)
def test_one_key_is_set(assignment: str, expected: dict[str, Any]) -> None:
    document: dict[str, Any] = {}
    override(document, assignment)
    assert document == expected


@pytest.mark.parametrize("assignment", ["stage", "=3", "zero..stage=3", "fp16.enabled.x=1"])
def test_a_wrong_assignment_is_named(assignment: str) -> None:
    with pytest.raises(ConfigError, match="--set " + assignment.split("=")[0]):
        override({"fp16": {"enabled": True}}, assignment)


def test_defaults_are_the_recipe() -> None:
    settings = parsed()
    assert settings.config == RECIPE and settings.config is not RECIPE
    assert (settings.layers, settings.heads, settings.width, settings.context, settings.steps) == (4, 4, 128, 64, 2000)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_recipe_is_a_valid_configuration(world_size: int) -> None:
    assert load(RECIPE, world_size).train_batch_size == 12


def test_options_go_over_the_configuration_file() -> None:
    example = "examples/ds_config_zero3.json"
    settings = parsed("--config", example, "--stage", "1", "--set", "fp16.enabled=false", "--steps", "7", "--no-tied")
    assert settings.config["zero_optimization"]["stage"] == 1
    assert settings.config["fp16"]["enabled"] is False
    assert settings.steps == 7 and settings.tied is False


def test_resuming_keeps_what_is_not_given_again(tmp_path: Path) -> None:
    first = parsed("--folder", str(tmp_path / "a"), "--width", "32", "--stage", "2", "--steps", "5")
    first.save()
    (tmp_path / "a").rename(tmp_path / "b")
    again = parsed("--resume", str(tmp_path / "b"), "--steps", "9")
    assert again.run == str(tmp_path / "b")
    assert again.width == 32 and again.steps == 9 and again.config == first.config


def test_mistakes_are_told(tmp_path: Path) -> None:
    parsed("--folder", str(tmp_path / "b")).save()
    with pytest.raises(OneCopyError, match=rf"the run is in {re.escape(str(tmp_path / 'b'))}: give that"):
        parsed("--resume", str(tmp_path / "b" / "checkpoints" / "global_step9"))
    (tmp_path / "b" / "settings.json").write_text("{")
    with pytest.raises(OneCopyError, match=r"settings\.json cannot be read .* start without --resume"):
        parsed("--resume", str(tmp_path / "b"))
    with pytest.raises(OneCopyError, match=r"--resume nowhere: there is no nowhere.settings\.json"):
        parsed("--resume", "nowhere")
    with pytest.raises(OneCopyError, match="--steps is 0"):
        parsed("--steps", "0")
