"""Which of a model's tensors a file's tensor is: by the same name, as transformers renames and converts them, or by a prefix."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onecopy.errors import ModelError
from onecopy.init.stored_tensor import StoredTensor


@dataclass(eq=False)
class Conversion:
    """Tensors of the files that are made into one or more of the model's: experts stacked, projections split.

    Attributes:
        sources: (the file's name, the pattern it matched) in the order they are converted in.
        shapes: of the results, by the model's names; known without reading anything.
    """

    model: Any
    converter: Any
    name: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The results, whole, by the model's names. Memory: sources and results.

        Raises:
            ModelError: the conversion, which is another library's code, fails.
        """
        try:
            return self._converted(read)
        except (ModelError, OSError):
            raise
        except Exception as error:
            raise ModelError(
                f"'{self.name}' cannot be made of {len(self.sources)} tensors of the files, '{self.sources[0][0]}' first "
                f"({type(error).__name__}: {error}); from_pretrained and save_pretrained write files that need no conversion"
            ) from error

    def _converted(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for stored, pattern in self.sources:
            converter.add_tensor(self.name, stored, pattern, read(stored))
        results = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


@dataclass
class StoredNames:
    """What the files' names mean.

    Attributes:
        source_of: the file's name, or a conversion, by the model's name.
        unexpected: names in the files that mean nothing to the model.
        used: transformers' renamings and conversions that were needed, for `save_pretrained` to undo.
    """

    source_of: dict[str, str | Conversion] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    used: list[Any] | None = None


def understand(model: nn.Module, stored: Mapping[str, StoredTensor], names: set[str]) -> StoredNames:
    """Find for the files' tensors which of the model's `names` they are; raises ModelError where a conversion fails."""
    if _is_of_transformers(model):
        return _as_transformers_does(model, stored, names)
    key_of = _prefixed(model, stored, names)
    found = {name: key for name in names if (key := key_of(name)) in stored}
    known = {key_of(name) for name in names}
    return StoredNames(dict(found), [key for key in stored if key not in known])


def _is_of_transformers(model: nn.Module) -> bool:
    library: Any = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _as_transformers_does(model: Any, stored: Mapping[str, StoredTensor], names: set[str]) -> StoredNames:
    """What `from_pretrained` does with names: all renamings, then at most one conversion, then the base model's prefix."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = dict.fromkeys(names, True)
    found, conversions = StoredNames(), dict[str, Conversion]()
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if name not in known:
            found.unexpected.append(key)
        elif pattern is None:
            found.source_of.setdefault(name, key)
        else:
            conversion = conversions.setdefault(name, Conversion(model, converter_of[pattern], name))
            conversion.sources.append((key, pattern))
    for conversion in conversions.values():
        _foresee(conversion, stored)
        found.source_of |= dict.fromkeys(conversion.shapes, conversion)
    found.used = [transform for transform in transforms if transform.was_used()]
    return found


def _foresee(conversion: Conversion, stored: Mapping[str, StoredTensor]) -> None:
    """Run the conversion on tensors without memory, which tells the results' names and shapes."""

    def imagined(name: str) -> torch.Tensor:
        return torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta")

    conversion.shapes = {name: tuple(value.shape) for name, value in conversion.run(imagined).items()}


def _prefixed(model: nn.Module, stored: Mapping[str, StoredTensor], names: set[str]) -> Callable[[str], str]:
    """How a name becomes the files': as it is where any agrees, else without or with the model's `base_model_prefix`."""
    base = getattr(model, "base_model_prefix", "")
    if base and not any(name in stored for name in names):
        for key_of in (lambda name: name.removeprefix(f"{base}."), lambda name: f"{base}.{name}"):
            if any(key_of(name) in stored for name in names):
                return key_of
    return lambda name: name
