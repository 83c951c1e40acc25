"""A document comes as a dict, a file, JSON text or base64; whatever is wrong with it is said plainly."""

from __future__ import annotations

import base64
import copy
import json
import os
from pathlib import Path

import pytest

from onecopy.config import Config, load
from onecopy.errors import ConfigError

DOCUMENT = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}
COMMENTED = """\
{ // the batch
  "train_batch_size": 8, # samples
  /* "stage": 1,
     "x": 2 */
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,},
  "tensorboard": {"output_path": "http://host/a//b#c,}"},
}
"""


def _file(folder: Path, text: str, name: str = "ds.json") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_dict_is_kept_by_identity_and_never_changed() -> None:
    document = {
        **copy.deepcopy(DOCUMENT),
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
    }
    before = copy.deepcopy(document)
    config = load(document, world_size=2)
    assert config.source is document
    assert document == before
    assert config.optimizer is not None
    config.optimizer.params["betas"].append(1)
    assert document == before


@pytest.mark.parametrize("as_text", [False, True], ids=["pathlib", "string"])
def test_a_file_may_have_comments_and_trailing_commas(tmp_path: Path, as_text: bool) -> None:
    path = _file(tmp_path, COMMENTED)
    config = load(str(path) if as_text else path, world_size=2)
    assert (config.train_batch_size, config.zero.stage, config.zero.reduce_bucket_size) == (8, 2, 500_000_000)
    assert config.tensorboard.output_path == "http://host/a//b#c,}"
    assert config.source["zero_optimization"]["stage"] == 2


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(DOCUMENT).encode())
    assert load(path).zero.stage == 2


@pytest.mark.parametrize("strip", ["", "="])
def test_url_safe_base64_of_json(strip: str) -> None:
    document = {**DOCUMENT, "tensorboard": {"job_name": "a?>ÿ~~"}}
    text = base64.urlsafe_b64encode(json.dumps(document, ensure_ascii=False).encode()).decode()
    assert load(text.rstrip(strip) if strip else text).tensorboard.job_name == "a?>ÿ~~"


def test_json_text_and_a_config_are_read_too() -> None:
    config = load(json.dumps(DOCUMENT), world_size=2)
    assert load(config) is config
    assert load(config, world_size=4).train_micro_batch_size_per_gpu == 2


@pytest.mark.parametrize("name", ["missing.json", "configs/ds", "aGVsbG8", "a" * 5000, "nul\0byte", "ds config.json"])
def test_a_missing_file_is_called_missing(name: str) -> None:
    with pytest.raises(ConfigError, match="file not found") as caught:
        load(name)
    assert "base64" not in str(caught.value).split("(from folder")[0]


def test_a_missing_path_names_the_nearest_file(tmp_path: Path) -> None:
    _file(tmp_path, "{}", "ds_config_zero3.json")
    with pytest.raises(ConfigError, match=r'file not found.*did you mean ".*ds_config_zero3.json"'):
        load(tmp_path / "ds_config_zero.json")


def test_a_repeated_key_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"train_batch_size": 8, "zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ConfigError, match='"stage" twice'):
        load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1\n "b": 2}', "line 2"),
        ("", "line 1"),
        ("[1]", "a list"),
        ('"text"', "a string"),
        ("{'a': 1}", "line 1"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "ordinary numbers"),
    ],
)
def test_what_is_not_json_is_said_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert "ds.json" in str(caught.value)


def test_folders_and_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder"):
        load(tmp_path)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "x.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, "{}")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)


@pytest.mark.parametrize("source", [None, 3, [1], b"{}", "", "  "])
def test_other_sources_are_refused(source: object) -> None:
    with pytest.raises(ConfigError, match="give a dict, the path of a JSON file, or base64"):
        load(source)  # type: ignore[arg-type]


def test_load_returns_a_config_that_cannot_be_changed() -> None:
    config = load({"train_batch_size": 1})
    assert isinstance(config, Config)
    with pytest.raises(AttributeError):
        config.train_batch_size = 2  # type: ignore[misc]
