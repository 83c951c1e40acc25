"""Read ranges of tensors out of files of weights: what they hold first, then no more bytes than asked for.

A folder is one file, or several that an index file (`*.index.json`) lists: safetensors, or where there are none the files of
`torch.save` that older models come in. Ranges are not mapped into memory, so what a rank does not own never counts as its
memory; a tensor that is kept whole and as it is can be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from onecopy.errors import ModelError
from onecopy.init.pickled_header import is_pickled, tensors_of_pickled
from onecopy.init.safetensors_header import tensors_of_safetensors
from onecopy.init.stored_tensor import StoredTensor

_BLOCK = 4 << 20  # elements converted at a time, where dtypes differ or the target is not host memory


class WeightFiles:
    """The tensors of a file of weights, or of a folder with some.

    Attributes:
        tensors: by name.
        bytes_read: bytes of tensors read so far, or mapped.

    Raises:
        ModelError: there is no such file, or one is damaged or of another kind; names it and the fix.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._mappings: dict[Path, Any] = {}  # torch.UntypedStorage of a whole file
        self._scratch = torch.empty(0, dtype=torch.uint8)
        wanted, files = _files_of(self.path)
        for file in files:
            self.tensors |= tensors_of_pickled(file) if is_pickled(file) else tensors_of_safetensors(file)
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
        self._mappings.clear()

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill the flat tensor `out` with elements `[start, start + out.numel())` of the tensor `name`, in `out`'s dtype."""
        stored = self.tensors[name]
        if stored.strides is not None:
            out.copy_(self._rearranged(stored).view(-1)[start : start + out.numel()])
            return
        position = stored.position + start * stored.dtype.itemsize
        if out.dtype == stored.dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(stored, position, out)
            return
        for low in range(0, out.numel(), _BLOCK):
            block = self._block(min(_BLOCK, out.numel() - low), stored.dtype)
            self._fill(stored, position + low * stored.dtype.itemsize, block)
            out[low : low + block.numel()].copy_(block)

    def whole(self, name: str) -> torch.Tensor:
        """One tensor in memory of its own, in the file's dtype."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read(name, 0, tensor.view(-1))
        return tensor

    def mapped(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """The whole tensor as the file's own pages, of which this process gets copies when it writes to them.

        None where it cannot be: the dtype is another one, its bytes are not aligned, or the file is not of safetensors. Whoever
        writes safetensors puts a new file in the old one's place, which a mapping outlives; `torch.save` writes into the old one.
        """
        stored = self.tensors[name]
        size, position = stored.numel * stored.dtype.itemsize, stored.position
        if stored.dtype != dtype or not size or position % dtype.itemsize or is_pickled(stored.file):
            return None
        if stored.file not in self._mappings:
            length = stored.file.stat().st_size
            self._mappings[stored.file] = torch.UntypedStorage.from_file(str(stored.file), False, length)
        self.bytes_read += size
        own = self._mappings[stored.file][position : position + size]  # or all weights would seem to share memory
        return torch.empty(0, dtype=dtype).set_(own).view(stored.shape)

    def _rearranged(self, stored: StoredTensor) -> torch.Tensor:
        """A tensor that does not lie row by row, row by row. Memory: twice the tensor."""
        assert stored.strides is not None
        reach = sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))
        flat = torch.empty(reach + 1 if stored.numel else 0, dtype=stored.dtype)
        self._fill(stored, stored.position, flat)
        return flat.as_strided(stored.shape, stored.strides).contiguous()

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
        return _listed(path) if path.name.endswith(".index.json") else ([], [path])
    if not path.is_dir():
        raise ModelError(f"there is no file or folder {path}; load_pretrained reads local files and downloads nothing")
    for pattern, single in (("*.safetensors", "model.safetensors"), ("pytorch_model*.bin", "pytorch_model.bin")):
        indices = sorted(path.glob(f"{pattern}.index.json"))
        if indices:
            return _listed(indices[0])
        files = sorted(path.glob(pattern))
        if len(files) == 1:
            return [], files
        if path / single in files:
            return [], [path / single]
        if files:
            raise ModelError(
                f"{path} holds {len(files)} files {pattern} and no index that lists them; name one of them"
            )
    raise ModelError(
        f"{path} holds neither safetensors files nor pytorch_model.bin; save the model with save_pretrained"
    )


def _listed(index: Path) -> tuple[list[str], list[Path]]:
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} is no index of files of weights ({error}); fetch it again") from error
    files = [index.parent / name for name in dict.fromkeys(places.values())]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(f"{index} lists {absent[0]}, which is not there; the folder is incomplete, fetch it again")
    return list(places), files
