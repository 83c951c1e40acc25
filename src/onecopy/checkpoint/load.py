"""Load: find a complete checkpoint, verify it, then let every rank read the ranges it owns into the tensors it has.

Nothing of the engine is touched before all ranks agree that the checkpoint is whole and fits the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onecopy.checkpoint import folder, optimizer_state, random_state, state
from onecopy.checkpoint.custom_load import call_custom_load, whole_state_dict
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.meeting import Meeting
from onecopy.checkpoint.pieces import flat_buffers, model_entries, plain_tensors
from onecopy.checkpoint.reader import RangeReader
from onecopy.checkpoint.save import raise_first, timeout_of
from onecopy.errors import CheckpointError
from onecopy.observe.log import note, warn

if TYPE_CHECKING:
    from onecopy.engine import Engine


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is loaded; see `Engine.load_checkpoint`."""

    module_strict: bool = True
    optimizer_states: bool = True
    scheduler_states: bool = True
    module_only: bool = False
    custom_load: Callable[..., Any] | None = None


class Loader:
    """Loads checkpoints into one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.count = 0
        self._previous: Meeting | None = None

    def load(
        self, directory: str | os.PathLike[str], tag: object, wanted: Wanted
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `Engine.load_checkpoint`."""
        engine = self.engine
        home, asked, problem = folder.absolute(directory), None if tag is None else str(tag), ""
        meeting = Meeting(engine.communicator, "load_checkpoint", self.count, timeout_of(engine))
        options: list[tuple[Path, Manifest]] = []
        try:
            home, asked = folder.locate(directory, tag)
            options = folder.options(home, asked)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        found = [[path.name, manifest.identity] for path, manifest in options]
        arrivals = meeting.arrive({"problem": problem, "found": found})
        self.count += 1
        if self._previous is not None:
            self._previous.leave()
        self._previous = meeting
        raise_first(arrivals)
        chosen = self._choose(meeting, home, asked, options, arrivals)
        if chosen is None:
            return None, None
        path, manifest = chosen
        with RangeReader(path, manifest) as reader:
            client_state = self._take(meeting, reader, wanted)
        return str(path), client_state

    # ------------------------------------------------------------------------------------------------------- choosing
    def _choose(
        self, meeting: Meeting, home: Path, asked: str | None, options: list[tuple[Path, Manifest]], arrivals: list[Any]
    ) -> tuple[Path, Manifest] | None:
        """The first option that every rank has and that is whole. All ranks call it and get the same one."""
        explicit = asked is not None and asked != folder.LATEST
        common = [entry for entry in arrivals[0]["found"] if all(entry in arrival["found"] for arrival in arrivals)]
        if not common:
            lacking = [rank for rank, arrival in enumerate(arrivals) if not arrival["found"]]
            if asked is None and len(lacking) == len(arrivals):
                warn(f"there is no complete checkpoint to load; {folder.describe_tags(home)}")
                return None
            if lacking and len(lacking) < len(arrivals):
                raise CheckpointError(
                    f"rank {lacking[0]} does not see the checkpoint that other ranks see in {home}; give a folder that all nodes "
                    "share, or each node the files that its ranks saved"
                )
            what = f"checkpoint '{asked}'" if explicit else "complete checkpoint"
            raise CheckpointError(f"there is no {what} in {home}; {folder.describe_tags(home)}")
        by_name = {path.name: (path, manifest) for path, manifest in options}
        refused: list[str] = []
        for attempt, (name, _) in enumerate(common):
            path, manifest = by_name[name]
            problems = self._verify(meeting, path, manifest, attempt)
            if not problems:
                if refused:
                    warn(
                        f"{refused[0]}; the newest complete checkpoint is loaded instead: '{manifest.tag}' of step {manifest.global_steps}"
                    )
                return path, manifest
            refused.append(f"checkpoint '{manifest.tag}' is damaged ({'; '.join(problems[:3])})")
        raise CheckpointError(f"{'; '.join(refused[:3])}; {folder.describe_tags(home)}")

    def _verify(self, meeting: Meeting, path: Path, manifest: Manifest, attempt: int) -> list[str]:
        """What is wrong with a checkpoint, the same on every rank. Each file is read by one rank that sees it."""
        seen = [name for name in manifest.files if os.path.exists(path / name)]
        sights = meeting.exchange(f"sight {attempt}", seen)
        load = [0] * meeting.world_size
        mine, nowhere = [], []
        everywhere = [set(sight) for sight in sights]
        for name, entry in sorted(manifest.files.items(), key=lambda item: -item[1].nbytes):
            readers = [rank for rank in range(meeting.world_size) if name in everywhere[rank]]
            if not readers:
                nowhere.append(name)
                continue
            reader = min(readers, key=lambda rank: load[rank])
            load[reader] += entry.nbytes
            if reader == meeting.rank:
                mine.append(name)
        problems = manifest.problems(path, [*mine, *(nowhere if meeting.rank == 0 else ())], lambda _: meeting.beat())
        return [problem for found in meeting.exchange(f"verified {attempt}", problems) for problem in found]

    # --------------------------------------------------------------------------------------------------------- taking
    def _take(self, meeting: Meeting, reader: RangeReader, wanted: Wanted) -> dict[str, Any]:
        """Read the checkpoint into the engine; returns the user's own state."""
        engine = self.engine
        everything = wanted.optimizer_states and not wanted.module_only
        problem, common, own = "", {}, None
        try:
            common = state.from_bytes((reader.folder / state.NAME).read_bytes(), str(reader.folder / state.NAME))
            own = _own_state(reader, meeting.rank) if everything else None
            if wanted.custom_load is None:
                _check_model(engine, reader.manifest, wanted.module_strict)
            if everything and engine.basic_optimizer is not None:
                mismatches = optimizer_state.group_problems(engine, common["optimizer_groups"])
                if mismatches:
                    raise CheckpointError(
                        f"{'; '.join(mismatches)}; load with load_optimizer_states=False, or build the groups as they were"
                    )
        except (CheckpointError, OSError) as error:
            problem = str(error)
        raise_first(meeting.exchange("fit", {"problem": problem}))
        engine._clear_window()
        if wanted.custom_load is not None:
            call_custom_load(engine, whole_state_dict(reader), wanted.custom_load)
        try:
            if wanted.custom_load is None:
                read_weights(engine, reader)
            if everything and engine.basic_optimizer is not None:
                optimizer_state.warn_of_another_kind(engine, common)
                optimizer_state.restore_states(engine, reader)
        except (CheckpointError, OSError) as error:
            problem = f"{error}; the engine holds a part of the checkpoint only and must load again before it is used"
        outcomes = meeting.exchange("read", {"problem": problem})
        meeting.part()
        raise_first(outcomes)
        if engine.awaited is not None:  # a model of the meta device waits for its values
            names = saved_keys(engine, reader.manifest) if wanted.custom_load is None else engine.awaited.names
            engine.awaited.arrived(list(names))
        if wanted.custom_load is None:
            for flat in flat_buffers(engine):
                flat.start_refresh()
            _restore_extra_states(engine, common["extra_state"])
            # Among another number of ranks nobody takes the place of one that saved.
            if own is not None and reader.manifest.world_size == meeting.world_size:
                state.restore_own_buffers(engine, own)
        engine.loaded_checkpoint_dp_world_size = reader.manifest.world_size
        if wanted.module_only:
            engine._keep_what_moves()
            return dict(common["client_state"])
        if wanted.scheduler_states:
            state.restore_scheduler(engine, common["lr_scheduler"])
        if everything and engine.basic_optimizer is not None:
            # After the schedule, which writes rates of its own.
            optimizer_state.restore_groups(engine, common["optimizer_groups"])
            optimizer_state.name_what_waits(engine, reader.manifest)
        self._restore_progress(common, own if everything else None)
        engine._keep_what_moves()
        return dict(common["client_state"])

    def _restore_progress(self, common: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Counters, loss scale, and with a full load data position and random generators."""
        engine = self.engine
        engine._unread.clear()
        engine.global_steps = common["global_steps"]
        engine.global_samples = common["global_samples"]
        engine.skipped_steps = common["skipped_steps"]
        engine.window.begin(common["micro_steps"])
        if engine.scaler is not None and common["loss_scaler"] is not None:
            engine.scaler.load_state_dict(common["loss_scaler"])
        if own is None:
            return
        loader = engine.training_dataloader
        if common["data"] is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(common["data"])
        if "random" in own:
            random_state.restore_random_state(own["random"], engine.device)


def _own_state(reader: RangeReader, rank: int) -> dict[str, Any] | None:
    """The state of the saved rank of this number; None for a rank that did not exist then."""
    name = random_state.file_name(rank)
    if name not in reader.manifest.files:
        if rank == reader.manifest.world_size and reader.manifest.world_size:
            note("ranks that the checkpoint does not have keep their own random generators", every_rank=True)
        return None
    found: dict[str, Any] = state.from_bytes((reader.folder / name).read_bytes(), str(reader.folder / name))
    return found


def _check_model(engine: Engine, manifest: Manifest, strict: bool) -> None:
    """Raises CheckpointError listing what the model and the checkpoint do not share; with `strict=False` only shapes count."""
    mine, saved = model_entries(engine), manifest.model
    theirs = {name: entry for first, entry in saved.items() for name in (first, *entry.aliases)}
    missing = [name for name in mine if name not in theirs]
    used = {name for first, entry in mine.items() for name in (first, *entry.aliases)}
    unexpected = [name for name, entry in saved.items() if not {name, *entry.aliases} & used]
    shapes = [
        f"'{name}' is {list(theirs[name].shape)} in the checkpoint and {list(entry.shape)} in the model"
        for name, entry in mine.items()
        if name in theirs and theirs[name].shape != entry.shape
    ]
    sentences = []
    if strict and missing:
        sentences.append(f"the checkpoint lacks {_some(missing)}")
    if strict and unexpected:
        sentences.append(f"the model lacks {_some(unexpected)}")
    if shapes:
        sentences.append("shapes differ: " + "; ".join(shapes[:5]))
    if sentences:
        hint = "" if shapes else " (load_module_strict=False loads what both have)"
        raise CheckpointError(f"checkpoint '{manifest.tag}' does not fit the model: {'. '.join(sentences)}{hint}")


def _some(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@torch.no_grad()
def read_weights(engine: Engine, reader: RangeReader) -> None:
    """Read masters, frozen weights and buffers; whole weights then wait to be brought up to the masters. Not collective."""
    keys = saved_keys(engine, reader.manifest)
    for flat in flat_buffers(engine):
        target = flat.master if flat.master is not None else flat.shard
        assert target is not None
        flat.finish_refresh()
        base, stop = (0, flat.numel) if target.numel() == flat.numel else (flat.own.start, flat.own.stop)
        for place in flat.layout.ranges:
            part = place.overlap(base, stop)
            if part is not None and place.name in keys:
                local = place.start + part[0] - base
                reader.read(keys[place.name], part[0], target[local : local + part[1] - part[0]])
    for name, tensor in plain_tensors(engine).items():
        if name in keys and tensor.numel():
            if tensor.is_contiguous():
                reader.read(keys[name], 0, tensor.detach().view(-1))
            else:
                tensor.detach().copy_(reader.whole(keys[name], tensor.dtype))


def saved_keys(engine: Engine, manifest: Manifest) -> dict[str, str]:
    """The checkpoint's key of each tensor of the model, found under any of its names."""
    first = {name: origin for origin, entry in manifest.model.items() for name in (origin, *entry.aliases)}
    keys = {}
    for name, entry in model_entries(engine).items():
        origin = next((first[each] for each in (name, *entry.aliases) if each in first), None)
        if origin is not None and f"model.{origin}" in manifest.tensors:
            keys[name] = f"model.{origin}"
    return keys


def _restore_extra_states(engine: Engine, saved: dict[str, Any]) -> None:
    for name, module in engine.module.named_modules():
        if name in saved and type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            module.set_extra_state(saved[name])
