"""Read `torch.save` files of strangers without executing what their pickles name.

Tensors and plain containers come out as they are. Anything else becomes an `Inert` object that only holds what the
pickle gave it: no module is imported, no function called, no class of the file's choice made.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from onecopy.errors import CheckpointError


class Inert:
    """What a pickle says about an object of a class that is not read: its class's name, arguments and state."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Inert:
        made = object.__new__(cls)
        made.arguments = arguments
        made.state = dict(keywords)
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.state: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.state.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state[key] = value

    def append(self, value: Any) -> None:
        self.arguments += (value,)

    def extend(self, values: Any) -> None:
        self.arguments += tuple(values)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Inert({type(self).__name__})"


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """What old pickles call to hold bytes."""
    return text.encode("latin1") if encoding == "latin1" else b""


def _rebuild_subclass(rebuild: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor of some subclass: the tensor alone, without what its class would have done."""
    return rebuild(*arguments) if rebuild in _REBUILDS.values() else Inert(rebuild, kind, arguments, state)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: defaultdict(),
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): _encode,
}
_REBUILDS = {
    ("torch._utils", name): getattr(torch._utils, name)
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
}
_ALLOWED |= {**_REBUILDS, ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_subclass}
_ALLOWED |= {
    ("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple, int, float, bool, complex)
}
_ALLOWED |= {("torch", str(d).removeprefix("torch.")): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_ALLOWED |= {
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch", "UntypedStorage"): torch.UntypedStorage,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module = "builtins" if module_name == "__builtin__" else module_name
        found = _ALLOWED.get((module, global_name))
        return found if found is not None else type(global_name, (Inert,), {"origin": module_name})


def _refuse(*unused: Any, **unused_too: Any) -> Any:
    raise CheckpointError("files of torch before 1.6 are not read")


_PICKLE = SimpleNamespace(Unpickler=_Unpickler, load=_refuse, loads=_refuse, __name__="inert")


def load_inert(path: Path) -> Any:
    """The content of a file of `torch.save`, tensors mapped from the disk where they are. Raises CheckpointError."""
    try:
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is no complete file of torch.save")
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # a mapped file is not compared with its checksums otherwise
        if damaged is not None:
            raise CheckpointError(
                f"{path} is damaged in its record {damaged}: checksums differ (a file saved under torch.serialization."
                "set_crc32_options(False) has none: load it and save it again)"
            )
        return torch.load(path, map_location="cpu", mmap=True, pickle_module=_PICKLE, weights_only=False)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from error
