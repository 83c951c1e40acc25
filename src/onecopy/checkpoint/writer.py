"""Write one rank's pieces into one file, as true-shape boxes that torch's distributed checkpoint reads, with checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onecopy.checkpoint.checksum import crc32
from onecopy.checkpoint.container import frame
from onecopy.checkpoint.file_writer import FileWriter, write_all
from onecopy.checkpoint.manifest import Chunk, FileEntry, TensorEntry
from onecopy.checkpoint.pieces import Piece
from onecopy.layout import boxes

_LARGEST_BYTES = 1 << 30  # of one box: keeps every box's own container below the 4 GiB of a plain zip


@dataclass
class Written:
    """What one rank wrote: its files, the chunks of tensors in them, state that is no tensor, and the names of numbers."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """As JSON would hold it."""
        return {
            "files": {n: [e.nbytes, e.crc32, e.rank, e.host] for n, e in self.files.items()},
            "tensors": {
                k: [
                    str(e.dtype).removeprefix("torch."),
                    list(e.shape),
                    [[c.file, c.position, c.start, c.numel, c.crc32] for c in e.chunks],
                ]
                for k, e in self.tensors.items()
            },
            "values": self.values,
            "numbers": self.numbers,
        }

    def take_in(self, plain: dict[str, Any]) -> None:
        """Add what another rank wrote."""
        self.files.update({name: FileEntry(*entry) for name, entry in plain["files"].items()})
        self.values.update(plain["values"])
        self.numbers = sorted({*self.numbers, *plain["numbers"]})
        for key, (dtype, shape, chunks) in plain["tensors"].items():
            entry = self.tensors.setdefault(key, TensorEntry(getattr(torch, dtype), tuple(shape)))
            entry.chunks += [Chunk(*chunk) for chunk in chunks]


def write_pieces(
    folder: Path,
    name: str,
    pieces: Iterable[Piece],
    written: Written,
    rank: int = 0,
    host: str = "",
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write `pieces` into the new file `name` and force it to the disk; what was written is added to `written`.

    Data goes from the tensors' memory into the file; from an accelerator one box at a time is copied to the host.
    """
    checksum = 0
    with FileWriter(folder / name, progress) as file:
        for piece in pieces:
            entry = written.tensors.setdefault(piece.key, TensorEntry(piece.data.dtype, piece.shape))
            for box_shape, start, data in _boxes_of(piece):
                content = raw_bytes(data)
                data_checksum = crc32(content)
                head, tail = frame(piece.data.dtype, box_shape, data_checksum)
                entry.chunks.append(Chunk(name, file.position + len(head), start, data.numel(), data_checksum))
                checksum = crc32(tail, crc32(head, checksum))
                for part in (head, content, tail):
                    file.write(part)
    written.files[name] = FileEntry(file.position, checksum, rank, host)


def _boxes_of(piece: Piece) -> Iterator[tuple[tuple[int, ...], int, torch.Tensor]]:
    """(shape, first element, flat data) of each box of a piece."""
    most = max(1, _LARGEST_BYTES // piece.data.dtype.itemsize)
    stop = piece.start + piece.data.numel()
    for low in range(piece.start, stop, most):
        for box in boxes(piece.shape, low, min(stop, low + most)):
            yield box.sizes, box.start, piece.data[box.start - piece.start : box.start - piece.start + box.numel]


def raw_bytes(flat: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor: its own memory on the CPU, a copy from elsewhere."""
    host = flat.detach().cpu().contiguous()
    content: Any = host.view(torch.uint8).numpy()
    return memoryview(content) if host.numel() else memoryview(b"")


def write_file(
    folder: Path, name: str, content: bytes, written: Written | None = None, rank: int = 0, host: str = ""
) -> None:
    """Write a small file and force it to the disk."""
    with open(folder / name, "xb", buffering=0) as file:
        write_all(file.fileno(), content, 0)
        os.fsync(file.fileno())
    if written is not None:
        written.files[name] = FileEntry(len(content), crc32(content), rank, host)
