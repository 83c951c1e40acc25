"""Read ranges of tensors out of safetensors files: the headers first, then no more bytes than asked for.

        8 bytes: length of the header | header, JSON: name -> dtype, shape, offsets | the tensors' bytes, row by row

A folder is one file, or several that an index file (`*.safetensors.index.json`) lists. Nothing is mapped into memory, so
what a rank does not own never counts as its memory.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onecopy.errors import ModelError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_BLOCK = 4 << 20  # elements converted at a time, where dtypes differ or the target is not host memory
_LARGEST_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes are: `position` is that of its first byte in `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    position: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class WeightFiles:
    """The tensors of a safetensors file, or of a folder with some.

    Attributes:
        tensors: by name.
        bytes_read: bytes of tensors read so far.

    Raises:
        ModelError: there is no such file, or one is damaged or of another kind; names it and the fix.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        wanted, files = _files_of(self.path)
        for file in files:
            self.tensors |= _tensors_of(file)
        lacking = [name for name in wanted if name not in self.tensors]
        if lacking:
            raise ModelError(
                f"the index in {self.path} lists '{lacking[0]}' and {len(lacking) - 1} more tensors that its files do not hold; "
                "the folder is incomplete, fetch it again"
            )

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill the flat tensor `out` with elements `[start, start + out.numel())` of the tensor `name`, in `out`'s dtype."""
        stored = self.tensors[name]
        position = stored.position + start * stored.dtype.itemsize
        if out.dtype == stored.dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(stored, position, out)
            return
        for low in range(0, out.numel(), _BLOCK):
            block = self._block(min(_BLOCK, out.numel() - low), stored.dtype)
            self._fill(stored, position + low * stored.dtype.itemsize, block)
            out[low : low + block.numel()].copy_(block)

    def _block(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to convert in, the same every time: small blocks made anew would leave holes between the shards."""
        if self._scratch.numel() < elements * dtype.itemsize:
            self._scratch = torch.empty(elements * dtype.itemsize, dtype=torch.uint8)
        return self._scratch[: elements * dtype.itemsize].view(dtype)

    def _fill(self, stored: StoredTensor, position: int, block: torch.Tensor) -> None:
        if not block.numel():
            return
        content: Any = block.detach().view(torch.uint8).numpy()
        view = memoryview(content)
        descriptor = self._descriptors.get(stored.file)
        if descriptor is None:
            descriptor = self._descriptors[stored.file] = os.open(stored.file, os.O_RDONLY)
        self.bytes_read += len(view)
        while len(view):
            count = os.preadv(descriptor, [view], position)
            if count <= 0:
                raise ModelError(f"{stored.file} ends too early; fetch it again")
            position += count
            view = view[count:]


def _files_of(path: Path) -> tuple[list[str], list[Path]]:
    """The tensors an index promises (none without an index), and the files to look into."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _listed(path)
        return [], [path]
    if not path.is_dir():
        raise ModelError(f"there is no file or folder {path}; load_pretrained reads local files and downloads nothing")
    indices = sorted(path.glob("*.safetensors.index.json"))
    if indices:
        return _listed(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return [], files
    if files:
        single = path / "model.safetensors"
        if single in files:
            return [], [single]
        raise ModelError(f"{path} holds {len(files)} safetensors files and no index that lists them; name one of them")
    others = [entry.name for entry in path.iterdir() if entry.suffix in (".bin", ".pt", ".pth")]
    if others:
        raise ModelError(
            f"{path} holds no safetensors file but {others[0]}, which cannot be read in ranges; "
            "save the model with safe_serialization=True first, or load a checkpoint with engine.load_checkpoint"
        )
    raise ModelError(f"{path} holds no safetensors file")


def _listed(index: Path) -> tuple[list[str], list[Path]]:
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} is no index of safetensors files ({error}); fetch it again") from error
    files = [index.parent / name for name in dict.fromkeys(places.values())]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{index} lists {absent[0]}, which is not there; the folder is incomplete, fetch it again")
    return list(places), files


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    """The header of one file, checked against the file's size."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            tensor = StoredTensor(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start)
            if stop - start != tensor.numel * tensor.dtype.itemsize or 8 + length + stop > size:
                raise ValueError(f"'{name}' does not fit its place")
            found[name] = tensor
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}); fetch it again") from error
    return found
