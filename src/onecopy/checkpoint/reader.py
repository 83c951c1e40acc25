"""Read flat ranges of a checkpoint's tensors straight into memory: no more bytes than asked for, no copy of the rest."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import torch

from onecopy.checkpoint.checksum import crc32
from onecopy.checkpoint.manifest import Chunk, Manifest, TensorEntry
from onecopy.checkpoint.writer import raw_bytes
from onecopy.errors import CheckpointError

_BLOCK = 4 << 20  # elements converted at a time, where dtypes differ or the target is not host memory


class RangeReader:
    """Open files of one checkpoint.

    Attributes:
        bytes_read: bytes of tensor data read so far.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0
        self._descriptors: dict[str, int] = {}
        self._sorted: dict[str, tuple[list[int], list[Chunk]]] = {}

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *unused: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def entry(self, key: str) -> TensorEntry:
        try:
            return self.manifest.tensors[key]
        except KeyError:
            raise CheckpointError(f"{self.folder} holds no '{key}'") from None

    def read(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill the flat tensor `out` with elements `[start, start + out.numel())` of `key`, in `out`'s dtype."""
        entry = self.entry(key)
        stop = start + out.numel()
        position = start
        while position < stop:
            chunk = self._chunk_at(key, position)
            until = min(stop, chunk.start + chunk.numel)
            self._copy(entry, chunk, position, out[position - start : until - start])
            position = until

    def whole(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor of its true shape, on the host. Raises CheckpointError where its checksums are wrong."""
        entry = self.entry(key)
        flat, position = torch.empty(entry.numel, dtype=dtype or entry.dtype), 0
        for block in self.blocks(key, _BLOCK):
            flat[position : position + block.numel()].copy_(block)
            position += block.numel()
        return flat.view(entry.shape)

    def blocks(self, key: str, most: int) -> Iterator[torch.Tensor]:
        """A tensor front to back, at most `most` elements at a time, each of which holds until the next is asked for.

        Raises CheckpointError after the last block of a chunk whose checksum is wrong.
        """
        entry = self.entry(key)
        buffer = torch.empty(min(most, entry.numel), dtype=entry.dtype)
        position = 0
        while position < entry.numel:
            chunk, checksum = self._chunk_at(key, position), 0
            stop = chunk.start + chunk.numel
            for low in range(position, stop, most):
                block = buffer[: min(most, stop - low)]
                self._fill(chunk.file, chunk.position + (low - chunk.start) * entry.dtype.itemsize, raw_bytes(block))
                checksum = crc32(raw_bytes(block), checksum)
                yield block
            if checksum != chunk.crc32:
                writer = self.manifest.files[chunk.file].writer
                raise CheckpointError(f"{chunk.file} ({writer}) is damaged in {key}: checksums differ")
            position = stop

    def _chunk_at(self, key: str, position: int) -> Chunk:
        if key not in self._sorted:
            chunks = self._readable(self.entry(key).chunks)
            self._sorted[key] = ([chunk.start for chunk in chunks], chunks)
        starts, chunks = self._sorted[key]
        index = bisect_right(starts, position) - 1
        if index < 0 or position >= chunks[index].start + chunks[index].numel:
            raise CheckpointError(f"{self.folder} lacks element {position} of '{key}'")
        return chunks[index]

    def _readable(self, chunks: list[Chunk]) -> list[Chunk]:
        """In order, each start once: nodes that share no folder each wrote some, and the one that is here is taken."""
        by_start: dict[int, Chunk] = {}
        for chunk in chunks:
            if chunk.start not in by_start or not os.path.exists(self.folder / by_start[chunk.start].file):
                by_start[chunk.start] = chunk
        return [by_start[start] for start in sorted(by_start)]

    def _copy(self, entry: TensorEntry, chunk: Chunk, start: int, out: torch.Tensor) -> None:
        size = entry.dtype.itemsize
        position = chunk.position + (start - chunk.start) * size
        if out.dtype == entry.dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(chunk.file, position, raw_bytes(out))
            return
        for low in range(0, out.numel(), _BLOCK):
            block = torch.empty(min(_BLOCK, out.numel() - low), dtype=entry.dtype)
            self._fill(chunk.file, position + low * size, raw_bytes(block))
            out[low : low + block.numel()].copy_(block)

    def _fill(self, file: str, position: int, view: memoryview) -> None:
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            path = self.folder / file
            try:
                descriptor = self._descriptors[file] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(
                    f"{path} ({self.manifest.files[file].writer}) cannot be read: {error.strerror}"
                ) from error
        self.bytes_read += len(view)
        while len(view):
            count = os.preadv(descriptor, [view], position)
            if count <= 0:
                raise CheckpointError(f"{self.folder / file} ends too early")
            position += count
            view = view[count:]
