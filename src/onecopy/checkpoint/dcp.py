"""The `.metadata` file of torch's distributed checkpoint, so that its readers (and FSDP2, torchtitan) read ours as theirs."""

from __future__ import annotations

import pickle
import sys
from functools import cache

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from onecopy.checkpoint.container import frame_lengths
from onecopy.checkpoint.manifest import Chunk, ModelEntry, TensorEntry
from onecopy.layout import boxes

NAME = ".metadata"


def metadata_bytes(tensors: dict[str, TensorEntry], model: dict[str, ModelEntry]) -> bytes:
    """The pickled metadata. Tied weights are listed under every name; their data is there once.

    Equal sizes and names are one object each, which pickle writes once: thousands of ranks make millions of chunks.
    """
    size = cache(torch.Size)
    box_of = cache(lambda shape, start, stop: boxes(shape, start, stop)[0])
    shared = {f"model.{name}": [f"model.{alias}" for alias in entry.aliases] for name, entry in model.items()}
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for key, given in tensors.items():
        entry = _each_once(given)
        for name in (key, *shared.get(key, ())):
            chunks: list[ChunkStorageMetadata] = []
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks
            )
            paths[name] = _path(name)
            for chunk in entry.chunks:
                box = box_of(entry.shape, chunk.start, chunk.start + chunk.numel)
                offsets = size(box.offsets)
                chunks.append(ChunkStorageMetadata(offsets, size(box.sizes)))
                head, tail = frame_lengths(entry.dtype, box.sizes)
                place = sys.intern(chunk.file), chunk.position - head, head + chunk.numel * entry.dtype.itemsize + tail
                stored[MetadataIndex(name, offsets)] = _StorageInfo(*place)
    return pickle.dumps(Metadata(described, planner_data=paths, storage_data=stored, version=CURRENT_DCP_VERSION))


def _each_once(entry: TensorEntry) -> TensorEntry:
    """Without the copies that nodes which share no folder write of what every rank holds; the first is this node's."""
    chunks: dict[int, Chunk] = {}
    for chunk in entry.chunks:
        chunks.setdefault(chunk.start, chunk)
    return TensorEntry(entry.dtype, entry.shape, list(chunks.values()))


def _path(key: str) -> tuple[str, ...]:
    """Where a key stands in the nested dictionary that people who use DCP load into."""
    if key.startswith("model."):
        return ("model", key.removeprefix("model."))
    name, _, state = key.removeprefix("optimizer.state.").rpartition(".")
    return ("optimizer", "state", name, state)
