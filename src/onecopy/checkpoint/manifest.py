"""What a checkpoint consists of: its files with sizes and checksums, and where every piece of every tensor lies.

The manifest is written last, so a folder without one is not a checkpoint. Everything `inspect` and `verify` tell, and
every position a reader needs, stands in it: no tensor file is opened to learn about a checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from onecopy.checkpoint.checksum import crc32
from onecopy.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "onecopy checkpoint"
VERSION = 1
_BLOCK = 1 << 20  # bytes read at a time: few enough to stay in the processor's cache for the checksum


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that lies in one piece in a file.

    Attributes:
        file: name of the file.
        position: where its raw data begins, in bytes from the file's start.
        start, numel: its elements in the row-major tensor.
        crc32: of its raw data.
    """

    file: str
    position: int
    start: int
    numel: int
    crc32: int


@dataclass(slots=True)
class TensorEntry:
    """A tensor of the checkpoint, cut into chunks that cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(slots=True)
class FileEntry:
    """A file: its length in bytes, the crc32 of its bytes outside chunks, the rank that wrote it and where."""

    nbytes: int
    crc32: int
    rank: int
    host: str = ""

    @property
    def writer(self) -> str:
        """Who wrote it, for messages."""
        return f"written by rank {self.rank}" + (f" on {self.host}" if self.host else "")


@dataclass(slots=True)
class ModelEntry:
    """A parameter or buffer of the model.

    Attributes:
        kind: "trained", "frozen" (also parameters no optimizer group holds) or "buffer".
        dtype: name of the dtype it is computed in.
        aliases: further names of the same tensor (tied weights).
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    aliases: list[str] = field(default_factory=list)


@dataclass
class Manifest:
    """See the module; `saved_at` is in nanoseconds since 1970 by the leader's clock.

    Attributes:
        identity: a text that no other save has, the same on all nodes.
        model: by name, in the model's order.
        tensors: by key: "model.NAME" (fp32 masters of what is trained), "optimizer.state.NAME.KEY".
        values: state of parameters that is no tensor, by the same kind of key.
        numbers: names of states that are one number for a parameter ("step"), as against one element a weight.
        moves_latest: whether the save moved the file `latest`.
    """

    tag: str
    identity: str
    saved_at: int
    world_size: int
    stage: int
    precision: str
    global_steps: int
    global_samples: int
    moves_latest: bool
    versions: dict[str, str]
    model: dict[str, ModelEntry]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    values: dict[str, Any] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------------ to and from JSON
    def to_json(self) -> str:
        names = list(self.files)
        number = {name: index for index, name in enumerate(names)}
        plain = {name: getattr(self, name) for name in _PLAIN}
        plain["model"] = {name: asdict(entry) for name, entry in self.model.items()}
        plain["files"] = [{"name": name, **asdict(entry)} for name, entry in self.files.items()]
        plain["tensors"] = {
            key: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "chunks": [[number[c.file], c.position, c.start, c.numel, c.crc32] for c in entry.chunks],
            }
            for key, entry in self.tensors.items()
        }
        text = json.dumps(plain)
        return (
            json.dumps({"format": FORMAT, "version": VERSION, "crc32": crc32(text.encode())})[:-1]
            + ', "content": '
            + text
            + "}"
        )

    @classmethod
    def from_json(cls, text: str, place: str) -> Manifest:
        """Raises CheckpointError when the text is no complete manifest of this version."""
        try:
            document = json.loads(text)
            version = document["version"]
            if document["format"] != FORMAT or version != VERSION:
                raise CheckpointError(
                    f"{place} is version {version} of the format; this onecopy reads version {VERSION}"
                )
            body = text[text.index(', "content": ') + len(', "content": ') : -1]
            if crc32(body.encode()) != document["crc32"]:
                raise CheckpointError(f"{place} is damaged: its checksum does not fit its content")
            content = document["content"]
            names = [entry["name"] for entry in content["files"]]
            return cls(
                **{name: content[name] for name in _PLAIN},
                model={n: ModelEntry(**{**e, "shape": tuple(e["shape"])}) for n, e in content["model"].items()},
                files={e["name"]: FileEntry(**{k: v for k, v in e.items() if k != "name"}) for e in content["files"]},
                tensors={
                    key: TensorEntry(
                        dtype_of(e["dtype"]), tuple(e["shape"]), [Chunk(names[c[0]], *c[1:]) for c in e["chunks"]]
                    )
                    for key, e in content["tensors"].items()
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{place} is damaged: it is no complete manifest ({error})") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint folder.

        Raises CheckpointError when there is none, or when it is damaged.
        """
        path = folder / NAME
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is damaged: it is no text") from error
        except OSError as error:
            raise CheckpointError(
                f"{folder} is no complete checkpoint: {NAME} cannot be read ({error.strerror})"
            ) from error
        return cls.from_json(text, str(path))

    # ------------------------------------------------------------------------------------------------------- questions
    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())

    @property
    def has_optimizer(self) -> bool:
        return any(key.startswith("optimizer.") for key in (*self.tensors, *self.values))

    def state_keys(self) -> dict[str, dict[str, str]]:
        """By parameter name: the keys of its optimizer state, and each one's key in `tensors` or `values`."""
        found: dict[str, dict[str, str]] = {}
        prefix = "optimizer.state."
        for key in (*self.tensors, *self.values):
            if key.startswith(prefix):
                name, _, state = key[len(prefix) :].rpartition(".")
                found.setdefault(name, {})[state] = key
        return found

    def problems(
        self, folder: Path, files: Iterable[str] | None = None, progress: Callable[[int], None] | None = None
    ) -> list[str]:
        """What is wrong with the files (default: all): one sentence each, naming file and cause. Reads every byte once."""
        names = self.files if files is None else files
        return file_problems(folder, {name: self.files[name] for name in names}, self.tensors, progress)


_PLAIN = (
    "tag", "identity", "saved_at", "world_size", "stage", "precision", "global_steps", "global_samples", "moves_latest", "versions",
    "values", "numbers",
)  # fmt: skip


def is_there(folder: Path) -> bool:
    """Whether a folder has a manifest. One that may not be looked into counts: reading it says why it cannot be read."""
    try:
        return stat.S_ISREG(os.stat(folder / NAME).st_mode)
    except PermissionError:
        return True
    except OSError:
        return False


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch knows no dtype '{name}'")
    return found


def file_problems(
    folder: Path,
    files: dict[str, FileEntry],
    tensors: dict[str, TensorEntry],
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """What is wrong with some of a checkpoint's files: one sentence each. Reads every byte of them once."""
    inside: dict[str, list[tuple[Chunk, str, int]]] = {name: [] for name in files}
    for key, entry in tensors.items():
        for chunk in entry.chunks:
            if chunk.file in inside:
                inside[chunk.file].append((chunk, key, chunk.numel * entry.dtype.itemsize))
    return [each for n, entry in files.items() for each in _problems_of(folder / n, entry, inside[n], progress)]


def _problems_of(
    path: Path, entry: FileEntry, chunks: list[tuple[Chunk, str, int]], progress: Callable[[int], None] | None
) -> list[str]:
    writer = entry.writer
    try:
        buffer = memoryview(bytearray(_BLOCK))
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.nbytes:
                return [f"{path.name} ({writer}) has {size} bytes and should have {entry.nbytes}"]
            found, frame, position = [], 0, 0
            for chunk, key, nbytes in sorted(chunks, key=lambda each: each[0].position):
                frame = _checksum(file, chunk.position - position, frame, progress, buffer)
                if _checksum(file, nbytes, 0, progress, buffer) != chunk.crc32:
                    found.append(f"{path.name} ({writer}) is damaged in {key}: checksums differ")
                position = chunk.position + nbytes
            if _checksum(file, entry.nbytes - position, frame, progress, buffer) != entry.crc32:
                found.append(f"{path.name} ({writer}) is damaged: checksums differ")
            return found
    except FileNotFoundError:
        return [f"{path.name} ({writer}) is missing"]
    except OSError as error:
        return [f"{path.name} ({writer}) cannot be read: {error.strerror or error}"]


def _checksum(file: Any, nbytes: int, checksum: int, progress: Callable[[int], None] | None, buffer: memoryview) -> int:
    while nbytes:
        count = file.readinto(buffer[: min(nbytes, _BLOCK)])
        if not count:
            raise OSError("it ends too early")
        checksum = crc32(buffer[:count], checksum)
        nbytes -= count
        if progress is not None:
            progress(count)
    return checksum
