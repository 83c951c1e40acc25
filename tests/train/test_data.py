"""Text to batches: nothing is lost in the vocabulary, and every world size sees the same global batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy.train.data import (
    CharacterVocabulary,
    Corpus,
    DataError,
    Draw,
    evaluation_starts,
    prepare,
    read_text,
    sequences,
    sequences_in_a_pass,
    shakespeare_files,
    vocabulary_from,
)

TEXT = "".join(f"line {number} of a small text\n" for number in range(200))


@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=1))
def test_characters_come_back(text: str) -> None:
    vocabulary = CharacterVocabulary.of(text)
    tokens = vocabulary.encode(text)
    assert tokens.dtype == np.uint16 and len(tokens) == len(text)
    assert vocabulary.decode(tokens.tolist()) == text
    again = vocabulary_from(json.loads(json.dumps(vocabulary.state())))
    assert np.array_equal(again.encode(text), tokens)


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(DataError, match="character 'z' does not occur"):
        CharacterVocabulary.of("abc").encode("abz")


def test_a_text_is_split_nine_to_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(str(tmp_path / "text.txt"), "character", tmp_path / "run")
    corpus = Corpus.open(tmp_path / "run", context=16)
    cut = int(len(TEXT) * 0.9)
    assert corpus.vocabulary.decode(corpus.train.tolist()) == TEXT[:cut]
    assert corpus.vocabulary.decode(corpus.validation.tolist()) == TEXT[cut:]


def test_a_prepared_folder_is_kept_for_the_same_text_only(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(str(tmp_path / "text.txt"), "character", tmp_path / "run")
    before = (tmp_path / "run" / "train.bin").stat().st_mtime_ns
    prepare(str(tmp_path / "text.txt"), "character", tmp_path / "run")
    assert (tmp_path / "run" / "train.bin").stat().st_mtime_ns == before
    (tmp_path / "text.txt").write_text(TEXT.upper())
    prepare(str(tmp_path / "text.txt"), "character", tmp_path / "run")
    assert Corpus.open(tmp_path / "run", 16).vocabulary.decode([0, 1, 2]) == "\n 0"


def test_byte_pairs_come_back(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(str(tmp_path / "text.txt"), "bpe:300", tmp_path / "run")
    corpus = Corpus.open(tmp_path / "run", context=16)
    assert 256 <= corpus.vocabulary.size <= 300
    assert len(corpus.train) < 0.9 * len(TEXT)
    assert corpus.vocabulary.decode(corpus.train.tolist()) == TEXT[: int(len(TEXT) * 0.9)]
    assert corpus.vocabulary.decode(corpus.vocabulary.encode("unseen, ü\n").tolist()) == "unseen, ü\n"


@pytest.mark.parametrize(
    ("source", "vocabulary", "context", "message"),
    [
        ("absent.txt", "character", 8, "absent.txt does not exist"),
        ("empty", "character", 8, r"folder without \*.txt files"),
        ("latin1.txt", "character", 8, r"latin1.txt is not UTF-8 text \(byte 1\)"),
        ("text.txt", "words", 8, "--vocabulary words is not known"),
        ("text.txt", "bpe:10", 8, "the size must be 256 to 65536"),
        ("text.txt", "character", 5000, "tokens, too few for two sequences of 5000"),
        ("nothing.txt", "character", 8, "the train part of the text has 0 tokens"),
    ],
)
def test_text_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, vocabulary: str, context: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("latin1.txt").write_bytes("aé".encode("latin-1"))
    Path("text.txt").write_text(TEXT)
    Path("nothing.txt").write_text("")
    with pytest.raises(DataError, match=message):
        prepare(source, vocabulary, tmp_path / "run")
        Corpus.open(tmp_path / "run", context)


def test_a_folder_is_read_in_order_of_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("not text")
    assert read_text(str(tmp_path)) == "first\nsecond"


def test_the_default_text_is_shakespeare_once() -> None:
    names = [file.name for file in shakespeare_files()]
    assert len(names) == 42 and "hamlet_gut.txt" in names
    assert not any(name.endswith("_gut_f.txt") for name in names)  # other spellings of the same works
    assert "Who's there?" in read_text(None)


def test_targets_are_one_ahead() -> None:
    inputs, targets = sequences(np.arange(10, dtype=np.uint16), np.array([0, 6]), context=3)
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [7, 8, 9]]
    assert inputs.dtype == torch.int64


@given(
    micro_batch=st.integers(1, 4), windows=st.integers(1, 3), world=st.sampled_from([1, 2, 4]), step=st.integers(0, 9)
)
def test_every_world_size_sees_the_same_global_batch(micro_batch: int, windows: int, world: int, step: int) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    alone = Draw(8, micro_batch * world, windows, rank=0, world_size=1, seed=7).starts(tokens, step)
    dealt = [Draw(8, micro_batch, windows, rank, world, seed=7).starts(tokens, step) for rank in range(world)]
    assert sorted(np.concatenate(dealt, axis=None)) == sorted(alone.reshape(-1))
    assert alone.max() + 8 < 1000


@pytest.mark.parametrize("length", [16, 17, 100, 131])
def test_a_pass_draws_every_sequence_once_and_stays_inside(length: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    a_pass = sequences_in_a_pass(tokens, 8)
    for number in range(3):
        draw = Draw(8, a_pass, 1, rank=0, world_size=1, seed=3)
        starts = np.sort(draw.starts(tokens, number).reshape(-1))
        assert len(starts) == a_pass >= 1 and set(np.diff(starts)) <= {8}
        assert 0 <= starts[0] < 8 and starts[-1] + 8 < length
        sequences(tokens, starts, 8)


def test_steps_and_seeds_draw_differently() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    draws = [tuple(Draw(8, 4, 1, 0, 1, seed).starts(tokens, step).reshape(-1)) for seed in (1, 2) for step in (0, 1)]
    assert len(set(draws)) == 4


def test_an_evaluation_covers_the_text_side_by_side() -> None:
    tokens = np.arange(65, dtype=np.uint16)
    assert evaluation_starts(tokens, 8, None).tolist() == [0, 8, 16, 24, 32, 40, 48, 56]
    assert evaluation_starts(tokens[:-1], 8, None).tolist()[-1] == 48
    assert evaluation_starts(tokens, 8, 3).tolist() == [0, 24, 56]
