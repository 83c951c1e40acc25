"""Weight files that others open (safetensors, or `torch.save`'s): laid out first, then filled by ranges in any order.

Headers follow from names, dtypes and shapes alone. So every rank knows where each parameter goes, writes its own ranges
there, and nobody ever holds a whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from onecopy.checkpoint.container import TensorRecord, lay_out
from onecopy.checkpoint.file_writer import Writeback, write_all
from onecopy.checkpoint.folder import sync_folder
from onecopy.checkpoint.writer import raw_bytes
from onecopy.errors import CheckpointError

_SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
_BLOCK = 4 << 20  # elements cast and written at a time
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be exported, and the further names it has."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def record(self) -> TensorRecord:
        return TensorRecord(self.name, self.dtype, self.shape)


@dataclass
class WeightFiles:
    """The files of one export, not yet written.

    Attributes:
        pieces: of each file, (position, bytes) of what is not tensor data.
        sizes: of each file, in bytes.
        places: of each tensor, its file and the position of its data.
        others: small files beside them (an index).
    """

    folder: Path
    pieces: dict[str, tuple[tuple[int, bytes], ...]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    others: dict[str, bytes] = field(default_factory=dict)

    def temporary(self, name: str) -> Path:
        """Where a file is written before it gets its name."""
        return self.folder / f".writing-{name}"

    def create(self) -> None:
        """Make the files with all but the tensor data, under temporary names."""
        for name, pieces in self.pieces.items():
            with open(self.temporary(name), "wb") as file:
                file.truncate(self.sizes[name])
                for position, content in pieces:
                    file.seek(position)
                    file.write(content)

    def finish(self, replaces: Sequence[str] = (), progress: Callable[[], None] = lambda: None) -> None:
        """Give the filled files their names, and delete those that a former export left under `replaces`.

        `progress` is called before each file is forced to the disk.
        """
        for name in self.pieces:
            progress()
            with open(self.temporary(name), "rb") as file:
                os.fsync(file.fileno())
            os.replace(self.temporary(name), self.folder / name)
        for name, content in self.others.items():
            self.temporary(name).write_bytes(content)
            os.replace(self.temporary(name), self.folder / name)
        for name in replaces:
            if name not in self.pieces and name not in self.others:
                (self.folder / name).unlink(missing_ok=True)
        sync_folder(self.folder)

    def discard(self) -> None:
        for name in self.pieces:
            self.temporary(name).unlink(missing_ok=True)


class RangeWriter:
    """Writes ranges of tensors into the files; every rank has one of its own, and what it wrote is on the disk at its end.

    `progress` is called before each file is forced to the disk.
    """

    def __init__(self, files: WeightFiles, progress: Callable[[], None] = lambda: None) -> None:
        self.files = files
        self.progress = progress
        self._open: dict[str, tuple[int, Writeback]] = {}

    def __enter__(self) -> RangeWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        try:
            for _, writeback in self._open.values() if kind is None else ():
                self.progress()
                writeback.finish()
        finally:
            for descriptor, _ in self._open.values():
                os.close(descriptor)

    def write(self, weight: Weight, start: int, data: torch.Tensor) -> None:
        """Write flat `data` as elements from `start` on of a tensor, cast block by block."""
        file, position = self.files.places[weight.name]
        if file not in self._open:
            descriptor = os.open(self.files.temporary(file), os.O_WRONLY)
            self._open[file] = descriptor, Writeback(descriptor)
        descriptor, writeback = self._open[file]
        position += start * weight.dtype.itemsize
        for low in range(0, data.numel(), _BLOCK):
            content = raw_bytes(data[low : low + _BLOCK].to(weight.dtype))
            write_all(descriptor, content, position)
            writeback.wrote(position, len(content))
            position += len(content)


# ------------------------------------------------------------------------------------------------------------- layouts
def plan_files(folder: Path, weights: Sequence[Weight], name: str, max_shard_bytes: int | None = None) -> WeightFiles:
    """Lay weights out in one file `name`, or in several with an index where one would exceed `max_shard_bytes`.

    A name that ends in ".safetensors" makes safetensors files, in which tied weights are there once, under their first
    name; any other makes `torch.save`'s, in which they have every name.
    """
    safe = name.endswith(".safetensors")
    parts = list(_split(weights, max_shard_bytes))
    stem, suffix = name.rsplit(".", 1) if "." in name else (name, "bin")
    names = (
        [name] if len(parts) == 1 else [f"{stem}-{i + 1:05d}-of-{len(parts):05d}.{suffix}" for i in range(len(parts))]
    )
    files = WeightFiles(folder)
    index: dict[str, str] = {}
    for file, part in zip(names, parts):
        (_safetensors if safe else _torch_file)(files, file, part)
        for weight in part:
            index[weight.name] = file
            if not safe:
                index.update(dict.fromkeys(weight.aliases, file))
    if len(parts) > 1:
        total = sum(weight.record.nbytes for weight in weights)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=2)
        files.others[f"{name}.index.json"] = (text + "\n").encode()
    return files


def former_files(folder: Path, name: str) -> list[str]:
    """Names of a former export of the same name, which a loader would mix up with the new one."""
    stem, suffix = name.rsplit(".", 1) if "." in name else (name, "bin")
    pattern = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}\.{re.escape(suffix)}")
    found = [entry.name for entry in folder.iterdir() if pattern.fullmatch(entry.name)]
    return [*found, name, f"{name}.index.json"]


def _split(weights: Sequence[Weight], most: int | None) -> Iterator[list[Weight]]:
    part: list[Weight] = []
    size = 0
    for weight in weights:
        if part and most is not None and size + weight.record.nbytes > most:
            yield part
            part, size = [], 0
        part.append(weight)
        size += weight.record.nbytes
    yield part


def _safetensors(files: WeightFiles, name: str, weights: Sequence[Weight]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    aliases = {alias: weight.name for weight in weights for alias in weight.aliases}
    header["__metadata__"] = {"format": "pt", **aliases}  # transformers looks for the other names of a tensor here
    position = 0
    # Wide types first: every tensor is then aligned to its own element size.
    for weight in sorted(weights, key=lambda weight: -weight.dtype.itemsize):
        if weight.dtype not in _SAFETENSORS_NAMES:
            raise CheckpointError(f"safetensors cannot hold '{weight.name}', which is {weight.dtype}; use a .bin file")
        stop = position + weight.record.nbytes
        header[weight.name] = {
            "dtype": _SAFETENSORS_NAMES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, stop],
        }
        files.places[weight.name] = (name, position)
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    files.pieces[name] = ((0, len(text).to_bytes(8, "little") + text),)
    files.sizes[name] = 8 + len(text) + position
    for weight in weights:
        files.places[weight.name] = (name, files.places[weight.name][1] + 8 + len(text))


def _torch_file(files: WeightFiles, name: str, weights: Sequence[Weight]) -> None:
    aliases = [(alias, weight.name) for weight in weights for alias in weight.aliases]
    container = lay_out([weight.record for weight in weights], aliases)
    files.pieces[name] = container.pieces
    files.sizes[name] = container.nbytes
    for weight, position in zip(weights, container.positions):
        files.places[weight.name] = (name, position)


def bytes_of(size: str | int | None) -> int | None:
    """A size such as 5000000, "5GB" or "512 MiB" in bytes. Raises CheckpointError when it is none."""
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise CheckpointError(f"{size!r} is no size; write a number of bytes, or one such as 5GB, 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])
