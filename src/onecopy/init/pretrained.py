"""`load_pretrained`: weights go from files straight into the shards; no rank reads what it does not keep.

Host memory a rank: its shard, and at most one block of a tensor while dtypes are converted. Tensors that transformers makes
of several, or splits, are whole for a moment, one at a time. A model that nobody shards gets the files' own pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onecopy.comm import Communicator, ensure_process_group
from onecopy.comm.connect import default_device
from onecopy.engine import Engine
from onecopy.engine.meta_buffers import materialise_buffers
from onecopy.errors import ModelError
from onecopy.init.stored_names import Conversion, understand
from onecopy.init.stored_weights import WeightFiles
from onecopy.init.targets import Target, all_names, allot, assign, targets_of_engine, targets_of_model
from onecopy.sharding.early import borrowed_communicator
from onecopy.sharding.early_parameter import settle_all

_SHOWN = 5


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_pretrained` found.

    Attributes:
        missing: parameters and buffers of the model that the files lack; they keep what they had.
        unexpected: tensors of the files that the model lacks.
        bytes_read: bytes of tensors that this rank read, or mapped.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@torch.no_grad()
def load_pretrained(
    engine_or_model: Engine | nn.Module, path: str | os.PathLike[str], strict: bool = True
) -> LoadedWeights:
    """Fill a model's weights from files, every rank the ranges it keeps. Collective.

    Args:
        engine_or_model: an engine, at any stage; or a model, whose parameters on the meta device become sharded as
            `zero.Init` does it, and whose other parameters are filled where they are. In a world of one rank those of the meta
            device become real; on the CPU and with the files' dtype they are the files' pages, mapped and private to the
            process as with `from_pretrained`: nothing is copied until it is written to, and the files stay as they are.
        path: a file, or a folder with one or with several and their index, as `save_pretrained` writes it: safetensors, or
            the files of `torch.save` of older models (`pytorch_model.bin`), of which no code is run.
        strict: False lets the files lack tensors of the model and have others.

    Values are converted to the model's dtypes. Tensors with several names in the model are filled once, under any of them.
    A model of transformers takes files whose names or layout `from_pretrained` changes, and changes them in the same way.

    Raises:
        ModelError: on every rank: there is no such file, a shape or kind of number differs, or with `strict` names do; the
            model is unchanged then.
    """
    engine = engine_or_model if isinstance(engine_or_model, Engine) else None
    model: nn.Module = engine.module if engine is not None else engine_or_model
    if engine is not None:
        communicator = engine.communicator
    else:
        ensure_process_group()
        communicator = borrowed_communicator(None, default_device())
        settle_all()
    problem, files = "", None
    try:
        files = WeightFiles(path)
        awaited = _awaited_buffers(engine, model)
        targets = targets_of_engine(engine) if engine is not None else targets_of_model(model)
        plan = _match(model, targets, files, strict, awaited)
    except (ModelError, OSError) as error:
        problem = str(error)
    _raise_together(communicator, problem)
    assert files is not None
    if engine is not None:
        engine._clear_window()
    try:
        with files:
            _fill(model, plan.pairs, files, communicator)
            if plan.used is not None:
                vars(model)["_weight_conversions"] = plan.used  # where from_pretrained leaves them for save_pretrained
    except (ModelError, OSError) as error:
        problem = f"{error}; the model holds a part of the weights only and must be loaded again before it is used"
    _raise_together(communicator, problem)
    if engine is not None:
        for flat in sorted((flat for unit in engine.units for flat in unit.buffers), key=lambda flat: flat.key):
            flat.start_refresh()
        if engine.awaited is not None:
            engine.awaited.arrived(name for target, _ in plan.pairs for name in target.names)
    return LoadedWeights(plan.missing, plan.unexpected, files.bytes_read)


def _awaited_buffers(engine: Engine | None, model: nn.Module) -> set[str]:
    if engine is None:
        return set(materialise_buffers(model))
    return set(engine.awaited.names) if engine.awaited is not None else set()


def _raise_together(communicator: Communicator, problem: str) -> None:
    """A rank that cannot go on stops all of them, with its own words. Collective."""
    for rank, other in enumerate(communicator.exchange(problem, "problems of load_pretrained")):
        if other:
            raise ModelError(other if rank == communicator.rank or other == problem else f"rank {rank}: {other}")


# ----------------------------------------------------------------------------------------------------- names and shapes
@dataclass(frozen=True)
class _Plan:
    """Which stored tensor, or result of a conversion, goes where."""

    pairs: list[tuple[Target, str | Conversion]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    used: list[Any] | None


def _match(model: nn.Module, targets: Sequence[Target], files: WeightFiles, strict: bool, awaited: set[str]) -> _Plan:
    """Pair the model's tensors with the files'; raises ModelError naming what does not fit."""
    meaning = understand(model, files.tensors, all_names(targets))
    pairs, missing, wrong = [], [], []
    for target in targets:
        source = next((found for name in target.names if (found := meaning.source_of.get(name)) is not None), None)
        if source is None:
            needed = target.kind == "parameter" or awaited & set(target.names)
            if needed and 0 not in target.shape:
                missing.append(target.names[0])
            continue
        if target.kind == "computed":
            continue  # old files hold rotary tables; the model has computed its own
        wrong += _mismatch(target, source, files)
        pairs.append((target, source))
    if wrong:
        raise ModelError(
            f"{files.path} does not fit the model: {_few(wrong)}; build the model from this folder's own settings"
        )
    unexpected = _not_ignored(model, "_keys_to_ignore_on_load_unexpected", meaning.unexpected)
    missing = _not_ignored(model, "_keys_to_ignore_on_load_missing", missing) if not awaited else missing
    if strict and (missing or unexpected):
        sentences = [f"it lacks {_few([repr(n) for n in missing])}"] if missing else []
        sentences += [f"it has {_few([repr(n) for n in unexpected])}, which the model lacks"] if unexpected else []
        raise ModelError(
            f"{files.path} does not fit the model: {' and '.join(sentences)}; build the model whose weights these are, or "
            "give strict=False to load what both have"
        )
    return _Plan(pairs, tuple(missing), tuple(unexpected), meaning.used)


def _mismatch(target: Target, source: str | Conversion, files: WeightFiles) -> list[str]:
    first = files.tensors[source if isinstance(source, str) else source.sources[0][0]]
    shape = (
        first.shape if isinstance(source, str) else next(source.shapes[n] for n in target.names if n in source.shapes)
    )
    if shape != target.shape:
        return [
            f"'{target.names[0]}' has shape {list(target.shape)} in the model and {list(shape)} in {first.file.name}"
        ]
    if (
        first.dtype.is_floating_point != target.dtype.is_floating_point
        or first.dtype.is_complex != target.dtype.is_complex
    ):
        return [
            f"'{target.names[0]}' is {target.dtype} in the model and {first.dtype} in {first.file.name} (quantised weights "
            "must be dequantised first)"
        ]
    return []


def _few(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _not_ignored(model: nn.Module, attribute: str, names: list[str]) -> list[str]:
    """The names that the model itself (a transformers model says so by patterns) does not want ignored."""
    patterns = [re.compile(pattern) for pattern in getattr(model, attribute, None) or ()]
    return [name for name in names if not any(pattern.search(name) for pattern in patterns)]


# ------------------------------------------------------------------------------------------------------------------ values
def _fill(
    model: nn.Module, pairs: Sequence[tuple[Target, str | Conversion]], files: WeightFiles, communicator: Communicator
) -> None:
    parameters = dict(model.named_parameters())
    together: dict[Conversion, list[Target]] = {}
    for target, source in pairs:
        parameter = parameters.get(target.names[0])
        if parameter is not None and parameter.is_meta:
            mapped = _mapped(target, source, files, communicator)
            if mapped is not None:
                assign(parameter, mapped)
                continue
            allot(parameter, target, communicator)
        if isinstance(source, Conversion):
            together.setdefault(source, []).append(target)
            continue
        for start, piece in target.pieces:
            files.read(source, start, piece)
        if target.holder is not None:
            target.holder.copy_(files.whole(source))
    for conversion, targets in together.items():
        if any(target.pieces or target.holder is not None for target in targets):
            _fill_converted(conversion, targets, files)


def _mapped(
    target: Target, source: str | Conversion, files: WeightFiles, communicator: Communicator
) -> torch.Tensor | None:
    """The file's own pages for a tensor that this rank keeps whole, where those can be had."""
    if communicator.world_size > 1 or communicator.device.type != "cpu" or isinstance(source, Conversion):
        return None
    return files.mapped(source, target.dtype)


def _fill_converted(conversion: Conversion, targets: Sequence[Target], files: WeightFiles) -> None:
    results = conversion.run(files.whole)
    for target in targets:
        value = next(results[name] for name in target.names if name in results)
        for start, piece in target.pieces:
            piece.copy_(value.reshape(-1)[start : start + piece.numel()])
        if target.holder is not None:
            target.holder.copy_(value)
