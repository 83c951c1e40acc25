"""The bytes that `torch.save` would put around raw tensor data, so that data can be written, read and skipped in place.

A file of `torch.save` is an uncompressed zip: a pickle that describes the tensors, and one record of raw bytes a storage.
All its positions follow from dtypes and sizes alone. So any rank can write its range of any record with `pwrite`, and
a reader can take a range of it with `pread`; `torch.load` reads the result as it reads its own files.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from onecopy.checkpoint.checksum import crc32

ALIGNMENT = 64  # bytes; where a record's data may begin
_LARGE = 0xFFFFFFFF  # what a zip's 32-bit field holds when the number stands in its 64-bit extra field


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a container: its name in the pickled dictionary, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Container:
    """A whole file but for the tensor data: pieces of bytes at their positions, and where each record's data begins.

    Attributes:
        pieces: (position, bytes) in ascending order.
        positions: position of the data of each record, in bytes from the start.
        nbytes: length of the whole file.
    """

    pieces: tuple[tuple[int, bytes], ...]
    positions: tuple[int, ...]
    nbytes: int


def frame(dtype: torch.dtype, shape: tuple[int, ...], checksum: int) -> tuple[bytes, bytes]:
    """What goes before and after the data of one tensor, to be read by `torch.load`. The data must be below 4 GiB."""
    written = struct.pack("<I", checksum)
    head, tail = (part[:at] + written + part[at + 4 :] for part, at in _open_frame(dtype, shape))
    return head, tail


def frame_lengths(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes before and after the data of one tensor."""
    (head, _), (tail, _) = _open_frame(dtype, shape)
    return len(head), len(tail)


@lru_cache(maxsize=4096)  # a model has many tensors and few shapes
def _open_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> list[tuple[bytes, int]]:
    """The two parts of a frame, each with where its checksum belongs: the bytes that differ between two checksums."""
    frames = []
    for checksum in (0, 0xFFFFFFFF):
        container = lay_out([TensorRecord("", dtype, shape)], bare=True, checksums=[checksum])
        position = container.positions[0]
        head = b"".join(piece for place, piece in container.pieces if place < position)
        tail = b"".join(piece for place, piece in container.pieces if place >= position)
        frames.append((head, tail))
    return [(one, next(at for at in range(len(one)) if one[at] != other[at])) for one, other in zip(*frames)]


def lay_out(
    records: Sequence[TensorRecord],
    aliases: Sequence[tuple[str, str]] = (),
    bare: bool = False,
    checksums: Sequence[int] | None = None,
) -> Container:
    """A file that `torch.load` reads as a dictionary of tensors by name, or (`bare`) as the one tensor itself.

    Args:
        aliases: (second name, name of a record): names that share a record's tensor, as tied weights do.
        checksums: crc32 of each record's data; 0 when left out, which torch does not look at.
    """
    files: list[tuple[str, bytes | None, int]] = [
        ("archive/data.pkl", _pickled(records, aliases, bare), 0),
        ("archive/byteorder", b"little", 0),
        ("archive/version", b"3\n", 0),
    ]
    files += [(f"archive/data/{index}", None, record.nbytes) for index, record in enumerate(records)]
    pieces: list[tuple[int, bytes]] = []
    positions: list[int] = []
    directory = b""
    position = 0
    for index, (name, content, nbytes) in enumerate(files):
        size = len(content) if content is not None else nbytes
        checksum = crc32(content) if content is not None else (checksums[index - 3] if checksums else 0)
        local = _local_header(name, size, checksum, position)
        directory += _directory_entry(name, size, checksum, position)
        pieces.append((position, local))
        position += len(local)
        if content is None:
            positions.append(position)
        else:
            pieces.append((position, content))
        position += size
    end = directory + _end_of_directory(len(files), len(directory), position)
    pieces.append((position, end))
    return Container(tuple(pieces), tuple(positions), position + len(end))


# ------------------------------------------------------------------------------------------------------------- the zip
def _local_header(name: str, size: int, checksum: int, position: int) -> bytes:
    """A local header padded so that what follows it is aligned."""
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LARGE else b""
    bare = 30 + len(name) + len(wide) + 4
    padding = -(position + bare) % ALIGNMENT
    extra = wide + struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # "FB": the padding torch itself writes
    short = _LARGE if wide else size
    fields = (0x04034B50, 45 if wide else 20, 0, 0, 0, 0x21, checksum, short, short, len(name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + name.encode() + extra


def _directory_entry(name: str, size: int, checksum: int, position: int) -> bytes:
    wide = b""
    if size >= _LARGE:
        wide += struct.pack("<QQ", size, size)
    if position >= _LARGE:
        wide += struct.pack("<Q", position)
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    short, place = min(size, _LARGE), min(position, _LARGE)
    version = 45 if wide else 20
    fields = (
        0x02014B50,
        version,
        version,
        0,
        0,
        0,
        0x21,
        checksum,
        short,
        short,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        place,
    )
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields) + name.encode() + extra


def _end_of_directory(count: int, size: int, position: int) -> bytes:
    wide = b""
    if count >= 0xFFFF or position >= _LARGE:
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, position)
        wide += struct.pack("<IIQI", 0x07064B50, 0, position + size, 1)
    short = min(count, 0xFFFF)
    return wide + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, short, short, size, min(position, _LARGE), 0)


# ---------------------------------------------------------------------------------------------------------- the pickle
class _Storage:
    """Stands for a storage while pickling; never unpickled."""

    def __init__(self, key: int, record: TensorRecord) -> None:
        self.key = key
        self.record = record


class _Tensor:
    """Pickles as the tensor of a record."""

    def __init__(self, storage: _Storage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        record = self.storage.record
        stride, step = [], 1
        for size in reversed(record.shape):
            stride.append(step)
            step *= max(size, 1)
        arguments: tuple[Any, ...] = (self.storage, 0, record.shape, tuple(reversed(stride)), False, OrderedDict())
        if _storage_class(record.dtype) is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*arguments, record.dtype)
        return torch._utils._rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = _storage_class(obj.record.dtype)
        length = obj.record.nbytes if kind is torch.UntypedStorage else obj.record.numel
        return "storage", kind, str(obj.key), "cpu", length


def _storage_class(dtype: torch.dtype) -> Any:
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name) if name else torch.UntypedStorage


def _pickled(records: Sequence[TensorRecord], aliases: Sequence[tuple[str, str]], bare: bool) -> bytes:
    tensors = {record.name: _Tensor(_Storage(index, record)) for index, record in enumerate(records)}
    content: Any = tensors[""] if bare else OrderedDict(tensors)
    for second, first in aliases:
        content[second] = tensors[first]
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(content)
    return stream.getvalue()
