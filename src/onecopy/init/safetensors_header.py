"""What a safetensors file holds, from its header.

8 bytes: length of the header | header, JSON: name -> dtype, shape, offsets | the tensors' bytes, row by row
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from onecopy.errors import ModelError
from onecopy.init.stored_tensor import StoredTensor

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_LARGEST_HEADER = 100 << 20


def tensors_of_safetensors(file: Path) -> dict[str, StoredTensor]:
    """The header of one file, checked against the file's size; raises ModelError where it is damaged."""
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
            tensor = StoredTensor(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start)
            if stop - start != tensor.numel * tensor.dtype.itemsize or 8 + length + stop > size:
                raise ValueError(f"'{name}' does not fit its place")
            found[name] = tensor
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}); fetch it again") from error
    return found
