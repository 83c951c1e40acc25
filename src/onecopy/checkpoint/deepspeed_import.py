"""Import: write what a DeepSpeed checkpoint holds as a checkpoint of ours, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from onecopy.checkpoint import folder, state
from onecopy.checkpoint.deepspeed_files import DeepSpeedCheckpoint, open_deepspeed
from onecopy.checkpoint.inert_pickle import Inert
from onecopy.checkpoint.manifest import ModelEntry
from onecopy.checkpoint.meeting import Meeting
from onecopy.checkpoint.pieces import Piece
from onecopy.checkpoint.save import Job, make_temporary, write
from onecopy.errors import CheckpointError
from onecopy.observe.log import note

_OPTIONS = frozenset({
    "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "dampening", "nesterov", "initial_lr", "name",
})  # fmt: skip
_BOOKKEEPING = state.RESERVED | {"sparse_tensor_module_names", "csr_tensor_module_names"}
"""What DeepSpeed's model states hold beside the user's client_state."""


def import_deepspeed(
    directory: str | os.PathLike[str], output: str | os.PathLike[str], tag: str | None = None
) -> tuple[Path, str]:
    """Turn a DeepSpeed checkpoint into one that every stage and world size loads. Not collective.

    Holds one file's mapping at a time beside what is written; nothing the files' pickles name is executed.

    Returns:
        The new checkpoint's folder, and a sentence about what it holds.

    Raises:
        CheckpointError: there is no such checkpoint, files are missing, or it is of a kind that is not read.
    """
    source = _tag_folder(Path(os.path.abspath(os.path.expanduser(os.fspath(directory)))), tag)
    found = open_deepspeed(source)
    model = _model_entries(found)
    out = Path(os.path.abspath(os.path.expanduser(os.fspath(output))))
    alone = SimpleNamespace(rank=0, world_size=1, imagined=False, group=None)
    meeting = Meeting(alone, "import", 0, 60.0)  # type: ignore[arg-type]
    name = folder.checked_tag(source.name)
    temporary, members = make_temporary(meeting, out, name, per_node=False)
    states = found.model_states
    kinds = {entry.dtype for entry in model.values() if entry.kind == "trained"}
    precision = "fp16" if "float16" in kinds else "bf16" if "bfloat16" in kinds else "fp32"
    head = {
        "identity": temporary,
        "world_size": 0,  # no rank's random generators are in it
        "stage": found.stage,
        "precision": precision,
        "global_steps": int(states.get("global_steps") or 0),
        "global_samples": int(states.get("global_samples") or 0),
    }
    seen: set[str] = set()
    numbers: list[str] = []
    job = Job(
        meeting, out, name, temporary, members, _noted(found, model, seen, numbers), {}, numbers,
        state.to_bytes(_common_state(found)), state.to_bytes({}), model, head, True, None,
    )  # fmt: skip
    write(job)
    trained = sum(entry.kind == "trained" for entry in model.values())
    held = "with optimizer states" if found.has_optimizer else "without optimizer states"
    return out / name, (
        f"step {head['global_steps']} of a stage {found.stage} run in {precision}, {trained} trained parameters {held}, "
        f"{len(model) - trained} others"
    )


def _tag_folder(directory: Path, tag: str | None) -> Path:
    if not directory.is_dir():
        raise CheckpointError(f"the folder {directory} does not exist")
    if tag is not None:
        path = directory / tag
    else:
        names = [directory / name for name in ("latest", "latest_universal") if (directory / name).is_file()]
        path = directory / names[0].read_text(errors="replace").strip() if names else directory
    if not path.is_dir():
        there = ", ".join(sorted(p.name for p in directory.iterdir() if p.is_dir())) or "none"
        raise CheckpointError(f"there is no checkpoint '{path.name}' in {directory}; folders there: {there}")
    return path


def _model_entries(found: DeepSpeedCheckpoint) -> dict[str, ModelEntry]:
    """The model's parameters and buffers in the order of DeepSpeed's module dictionary."""
    module: dict[str, torch.Tensor] = found.model_states["module"]
    shared: dict[str, str] = dict(found.model_states.get("shared_params") or {})
    buffers = set(found.model_states.get("buffer_names") or ())
    entries: dict[str, ModelEntry] = {}
    names = [*module, *(name for name in (*found.trained, *found.frozen) if name not in module)]
    for name in names:
        if name in shared:
            continue
        value = module.get(name)
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "float32"
        if name in found.trained:
            entries[name] = ModelEntry("trained", dtype, found.trained[name])
        elif name in found.frozen:
            entries[name] = ModelEntry("frozen", dtype, found.frozen[name])
        elif isinstance(value, torch.Tensor):
            entries[name] = ModelEntry("buffer" if name in buffers else "frozen", dtype, tuple(value.shape))
    for alias, name in shared.items():
        if name in entries:
            entries[name].aliases.append(alias)
    return entries


def _noted(
    found: DeepSpeedCheckpoint, model: dict[str, ModelEntry], seen: set[str], numbers: list[str]
) -> Iterator[Piece]:
    """All pieces; names of states that are one number are added to `numbers` on the way."""
    module = found.model_states["module"]
    kept_apart = {*(found.trained if found.has_optimizer else ()), *found.frozen}
    for piece in found.pieces() if found.has_optimizer else ():
        if piece.key.startswith("optimizer."):
            name = piece.key.rsplit(".", 1)[1]
            if name == "step" and name not in numbers:
                numbers.append(name)
        yield piece
    for name, entry in model.items():
        if name not in kept_apart and name in module:
            yield Piece(f"model.{name}", entry.shape, 0, module[name].detach().contiguous().reshape(-1))


def _common_state(found: DeepSpeedCheckpoint) -> dict[str, Any]:
    """The small state in our own form; what the user's client_state held is taken where it is plain data."""
    states = found.model_states
    groups = [
        {"names": list(names), "options": {k: v for k, v in options.items() if k in _OPTIONS}}
        for names, options in zip(found.groups, found.options)
    ]
    client = {}
    for key, value in states.items():
        if key not in _BOOKKEEPING:
            try:
                client[key] = state.plain(_without_inert(value), str(key))
            except CheckpointError:
                note(f"client_state['{key}'] is of a class that is not read; it is left out")
    scheduler = states.get("lr_scheduler")
    return {
        "global_steps": int(states.get("global_steps") or 0),
        "global_samples": int(states.get("global_samples") or 0),
        "skipped_steps": int(states.get("skipped_steps") or 0),
        "micro_steps": 0,
        "loss_scaler": _loss_scaler(found.loss_scaler),
        "lr_scheduler": None if isinstance(scheduler, Inert) else scheduler,
        "optimizer_groups": groups,
        "optimizer_class": None,
        "data": None,
        "extra_state": {},
        "config": None if isinstance(states.get("ds_config"), Inert) else state._json_like(states.get("ds_config")),
        "client_state": client,
    }


def _without_inert(value: Any) -> Any:
    if isinstance(value, Inert):
        raise CheckpointError("a class that is not read")
    return value


def _loss_scaler(saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """DeepSpeed's dynamic scaler in the form ours is saved in."""
    if not saved or "cur_iter" not in saved:
        return None
    return {
        "dynamic": True,
        "scale": float(saved["cur_scale"]),
        "hysteresis_left": int(saved.get("cur_hysteresis", 1)),
        "steps": int(saved["cur_iter"]),
        "last_overflow": int(saved.get("last_overflow_iter", -1)),
    }
