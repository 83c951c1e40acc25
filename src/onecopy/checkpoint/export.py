"""Export: 16-bit or fp32 weight files out of a live engine or a checkpoint, in pieces, never gathered anywhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onecopy.checkpoint import folder
from onecopy.checkpoint.file_writer import FileWriter
from onecopy.checkpoint.manifest import Manifest, ModelEntry, dtype_of
from onecopy.checkpoint.meeting import Meeting
from onecopy.checkpoint.pieces import flat_buffers, model_entries, model_pieces
from onecopy.checkpoint.reader import RangeReader
from onecopy.checkpoint.save import cause_of, companions, raise_first, timeout_of
from onecopy.checkpoint.weight_files import RangeWriter, Weight, WeightFiles, bytes_of, former_files, plan_files
from onecopy.checkpoint.writer import raw_bytes
from onecopy.errors import CheckpointError
from onecopy.observe.log import warn

if TYPE_CHECKING:
    from onecopy.engine import Engine

_BLOCK = 1 << 20  # elements read at a time: few enough to stay in the processor's cache
_FILES = 2  # written at a time
_BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip


def weights_of(model: dict[str, ModelEntry], dtype: torch.dtype | None, exclude_frozen: bool = False) -> list[Weight]:
    """What is exported of a model: parameters in `dtype` (None: as they are computed in), buffers as they are."""
    found = []
    for name, entry in model.items():
        own = dtype_of(entry.dtype)
        if entry.kind == "frozen" and exclude_frozen:
            continue
        cast = dtype if dtype is not None and own.is_floating_point and entry.kind != "buffer" else own
        found.append(Weight(name, cast, tuple(entry.shape), tuple(entry.aliases)))
    return found


# ------------------------------------------------------------------------------------------------- from a live engine
class Exporter:
    """Exports one engine's weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.count = 0
        self._previous: Meeting | None = None

    def save_16bit(self, directory: str | os.PathLike[str], name: str, exclude_frozen: bool) -> bool:
        """See `Engine.save_16bit_model`."""
        engine = self.engine
        zero = engine.configuration.zero
        if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save:
            warn(
                f"save_16bit_model wrote nothing to {os.fspath(directory)}: zero_optimization.stage3_gather_16bit_weights_on_model_save "
                "is false; set it to true, or save a checkpoint and run `onecopy export`"
            )
            return False
        if engine.configuration.checkpoint.export_format == "safetensors" and name == "pytorch_model.bin":
            name = "model.safetensors"
        path = folder.absolute(directory)
        meeting = Meeting(engine.communicator, "save_16bit_model", self.count, timeout_of(engine))
        meeting.arrive("")
        self.count += 1
        if self._previous is not None:
            self._previous.leave()
        self._previous = meeting
        weights = weights_of(model_entries(engine), None, exclude_frozen)
        limit = bytes_of("5GB") if name.endswith(".safetensors") else None
        files = plan_files(path, weights, name, limit)
        leads = meeting.rank == 0
        try:
            self._together(meeting, "created", path, lambda: _create(files) if leads else None)
            self._together(meeting, "written", path, lambda: self._write(files, weights, meeting))
            self._together(meeting, "done", path, lambda: self._finish(files, name, meeting.beat) if leads else None)
        except CheckpointError:
            if leads:
                files.discard()
            raise
        meeting.part()
        return True

    def _write(self, files: WeightFiles, weights: list[Weight], meeting: Meeting) -> None:
        by_key = {f"model.{weight.name}": weight for weight in weights}
        with RangeWriter(files, meeting.beat) as writer:
            for piece in model_pieces(self.engine):
                if piece.key in by_key:
                    writer.write(by_key[piece.key], piece.start, piece.data)
                    meeting.beat()

    def _finish(self, files: WeightFiles, name: str, progress: Callable[[], None]) -> None:
        files.finish(former_files(files.folder, name), progress)
        for companion, content in companions(self.engine).items():
            (files.folder / companion).write_bytes(content)

    @staticmethod
    def _together(meeting: Meeting, step: str, path: Path, work: Callable[[], None]) -> None:
        """Do a part of the work and raise on every rank what one of them met."""
        problem = ""
        try:
            work()
        except (OSError, CheckpointError) as error:
            problem = cause_of(error, path)
        raise_first(meeting.exchange(step, {"problem": problem}))


def _create(files: WeightFiles) -> None:
    folder.make_folder(files.folder)
    files.create()


@torch.no_grad()
def consolidated(engine: Engine, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """All weights and buffers in the dtype they are computed in, on rank 0's host; None on the others. Collective.

    Gathers one flat buffer at a time; only the result is whole.
    """
    entries = model_entries(engine)
    here = engine.communicator.rank == 0
    found: dict[str, torch.Tensor] = {}
    for flat in flat_buffers(engine):
        if exclude_frozen and not flat.trainable:
            continue
        kept = flat.master if flat.master is not None else flat.shard
        assert kept is not None
        whole = torch.zeros(flat.numel, dtype=flat.dtype, device=kept.device)
        whole[flat.own] = flat.owned(kept).to(flat.dtype)
        if engine.communicator.world_size > 1:
            engine.communicator.gather(whole, flat.key, flat.label)
        if here:
            for name, view in zip(flat.names, flat.views(whole)):
                found[name] = view.to("cpu", copy=True)
        del whole
    if not here:
        return None
    plain = dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
    result: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if exclude_frozen and entry.kind == "frozen":
            continue
        value = found[name] if name in found else plain[name].detach().to("cpu", copy=True)
        result.update(dict.fromkeys((name, *entry.aliases), value))
    return result


# -------------------------------------------------------------------------------------------------- from a checkpoint
def export(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dtype: str | None = "bf16",
    max_shard_size: str | int | None = "5GB",
    tag: str | None = None,
    name: str = "model.safetensors",
    exclude_frozen_parameters: bool = False,
    model_folder: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint as files that vLLM, transformers and safetensors open.

    Holds a block of a million elements a file at a time, whatever the model's size. Needs no process group.

    Args:
        checkpoint: a folder of checkpoints (then `tag` says which, default the newest) or of one.
        dtype: "bf16", "fp16", "fp32", or None for the dtype each parameter was computed in; buffers keep theirs.
        name: "model.safetensors", or "pytorch_model.bin" for `torch.save`'s format.
        model_folder: where configuration and tokenizer files are taken from.

    Returns:
        The files written.
    """
    path, manifest = find(checkpoint, tag)
    out = folder.absolute(output)
    beside = [path, *([folder.absolute(model_folder)] if model_folder is not None else [])]
    kind = torch_dtype(dtype)
    weights = weights_of(manifest.model, kind, exclude_frozen_parameters)
    files = plan_files(out, weights, name, bytes_of(max_shard_size))
    for origin in beside:
        if not origin.is_dir():
            raise CheckpointError(f"{origin} is no folder to take configuration and tokenizer files from")
    folder.make_folder(out)
    files.discard()  # what a killed export left
    try:
        fill(files, weights, path, manifest)
        files.finish(former_files(out, name))
    except OSError as error:
        files.discard()
        raise CheckpointError(f"nothing was exported to {out}: {error.strerror or error}") from error
    except CheckpointError as error:
        files.discard()
        raise CheckpointError(f"nothing was exported to {out}: {error}; {folder.describe_tags(path.parent)}") from error
    except BaseException:
        files.discard()
        raise
    copied = _copy_beside(beside, out)
    return [out / each for each in (*files.pieces, *files.others, *copied)]


def fill(files: WeightFiles, weights: Iterable[Weight], path: Path, manifest: Manifest) -> None:
    """Write the files front to back out of a checkpoint's tensors, up to two files at a time."""
    inside: dict[str, list[tuple[int, Weight]]] = {name: [] for name in files.pieces}
    for weight in weights:
        file, position = files.places[weight.name]
        inside[file].append((position, weight))

    def one(file: str) -> None:
        parts: list[tuple[int, int, bytes | Weight]] = [(at, 0, content) for at, content in files.pieces[file]]
        parts += [(at, 1, weight) for at, weight in inside[file] if weight.record.nbytes]
        with RangeReader(path, manifest) as reader, FileWriter(files.temporary(file)) as out:
            for position, _, part in sorted(parts, key=lambda each: each[:2]):
                assert out.position == position, f"{file} has a gap at {out.position}"
                if isinstance(part, bytes):
                    out.write(part)
                else:
                    _copy(part, reader, out)

    with ThreadPoolExecutor(min(_FILES, os.cpu_count() or 1)) as pool:
        list(pool.map(one, files.pieces))


def _copy(weight: Weight, reader: RangeReader, out: FileWriter) -> None:
    """Append one tensor, in the dtype asked for, some elements at a time."""
    for block in reader.blocks(f"model.{weight.name}", _BLOCK):
        out.write(raw_bytes(block.to(weight.dtype)))


def find(checkpoint: str | os.PathLike[str], tag: str | None = None) -> tuple[Path, Manifest]:
    """The checkpoint folder and its manifest. Raises CheckpointError when there is none."""
    home, wanted = folder.locate(checkpoint, tag)
    options = folder.options(home, wanted)
    if not options:
        raise CheckpointError(f"there is no complete checkpoint in {home}; {folder.describe_tags(home)}")
    return options[0]


_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
}  # fmt: skip


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of a name on the command line; None and "as-trained" are the one each parameter was computed in."""
    if name is None or name == "as-trained":
        return None
    if name not in _DTYPES:
        raise CheckpointError(f"{name!r} is no dtype to export in; choose bf16, fp16, fp32 or as-trained")
    return _DTYPES[name]


def _copy_beside(origins: list[Path], out: Path) -> list[str]:
    copied = []
    for origin in origins:
        for name in _BESIDE:
            if (origin / name).is_file() and origin != out:
                shutil.copyfile(origin / name, out / name)
                copied.append(name)
    return list(dict.fromkeys(copied))
