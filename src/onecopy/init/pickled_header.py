"""What a file of `torch.save` holds (`pytorch_model.bin`), without its tensors' bytes and without running code from it.

It is a zip archive whose entries are not compressed: a pickle of names, dtypes and shapes, and an entry for each storage.
Only the pickle is read, by torch's restricted unpickler, which also tells at which byte of the file a storage begins.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from onecopy.errors import ModelError
from onecopy.init.stored_tensor import StoredTensor

_ZIP = b"PK\x03\x04"


def is_pickled(file: Path) -> bool:
    """Whether a file of that name is one of `torch.save`."""
    return file.suffix in (".bin", ".pt", ".pth", ".ckpt")


def tensors_of_pickled(file: Path) -> dict[str, StoredTensor]:
    """Names and places of the tensors; raises ModelError for damaged files and for those that hold something else."""
    with open(file, "rb") as opened:
        if opened.read(4) != _ZIP:
            raise ModelError(
                f"{file} is no file that torch.save has written since torch 1.6; fetch it again, or torch.load it with "
                "weights_only=True and save what that gives"
            )
    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file} holds other objects than tensors, and reading those would run code from the file; write model.state_dict() "
            "into a file, with safetensors or torch.save"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelError(
            f"{file} is no whole file of torch.save ({str(error).splitlines()[0]}); fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, not tensors by name; save model.state_dict()")
    size = file.stat().st_size
    return {str(name): _place(file, size, str(name), tensor) for name, tensor in content.items()}


def _place(file: Path, size: int, name: str, tensor: Any) -> StoredTensor:
    if not isinstance(tensor, torch.Tensor):
        raise ModelError(
            f"{file} holds '{name}', a {type(tensor).__name__}, among its tensors; save model.state_dict() by itself"
        )
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if begin is None or tensor.layout != torch.strided:
        raise ModelError(
            f"'{name}' in {file} does not lie there element by element (it is sparse, say); save its elements, all of them"
        )
    position = begin + tensor.storage_offset() * tensor.dtype.itemsize
    stored = StoredTensor(
        file, tensor.dtype, tuple(tensor.shape), position, None if tensor.is_contiguous() else tensor.stride()
    )
    if begin + tensor.untyped_storage().nbytes() > size:
        raise ModelError(f"{file} ends before the bytes of '{name}'; fetch it again")
    return stored
