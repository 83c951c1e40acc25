"""DeepSpeed's checkpoint files (ZeRO 1, 2, 3 and universal, of 0.16 to 0.19) as pieces of tensors by parameter name.

stages 1, 2   a group's parameters lie end to end, cut into one flat partition a rank; `param_slice_mappings` says
              which elements of which parameter a partition holds
stage 3       every parameter is cut into equal parts, one a rank; a rank's parts lie end to end
universal     a folder a parameter, a whole tensor a file
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onecopy.checkpoint.inert_pickle import Inert, load_inert
from onecopy.checkpoint.pieces import Piece
from onecopy.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]


@dataclass
class DeepSpeedCheckpoint:
    """An open checkpoint.

    Attributes:
        stage: 0 to 3; of a universal one, the stage it was made from.
        model_states: of the first rank, as its file holds it.
        groups: shapes of trained parameters by name, one dictionary an optimizer group.
        frozen: shapes of parameters that are kept apart because they are not trained (stage 3).
        options: each group's options.
        loss_scaler: its attributes, or None.
    """

    folder: Path
    stage: int
    model_states: dict[str, Any]
    groups: list[Shapes]
    frozen: Shapes
    options: list[dict[str, Any]] = field(default_factory=list)
    loss_scaler: dict[str, Any] | None = None
    _others: list[dict[str, Any]] = field(default_factory=list)  # model states of all ranks (stage 3)
    _partitions: list[dict[str, Any]] = field(default_factory=list)  # optimizer states of all ranks
    _universal: bool = False

    @property
    def trained(self) -> Shapes:
        return {name: shape for group in self.groups for name, shape in group.items()}

    @property
    def has_optimizer(self) -> bool:
        return bool(self._partitions) or self._universal

    def pieces(self) -> Iterator[Piece]:
        """Every piece of masters and optimizer states of trained parameters, and of frozen ones kept apart."""
        if self._universal:
            yield from self._universal_pieces()
        elif self.stage == 3:
            yield from self._stage3_pieces()
        else:
            yield from self._stage12_pieces()
        for name, shape in self.frozen.items():
            position, numel = 0, math.prod(shape)
            for states in self._others:
                fragment = states["frozen_param_fragments"][name].reshape(-1)[: numel - position]
                if len(fragment):
                    yield Piece(f"model.{name}", shape, position, fragment)
                position += len(fragment)

    # ------------------------------------------------------------------------------------------------- stages 1 and 2
    def _stage12_pieces(self) -> Iterator[Piece]:
        shapes = self.trained
        done: dict[str, int] = {}
        for states in self._partitions:
            mappings = states.get("param_slice_mappings")
            base = states["base_optimizer_state"]
            if mappings is None or not isinstance(base, dict):
                raise CheckpointError(
                    f"{self.folder} was saved with zero_optimization.elastic_checkpoint, or by DeepSpeed before 0.16; convert it with "
                    "DeepSpeed's ds_to_universal and import that"
                )
            for index, mapping in enumerate(mappings):
                flat = states["single_partition_of_fp32_groups"][index]
                moments = base["state"].get(index, {})
                for name, address in mapping.items():
                    place, count = address.state["start"], address.state["numel"]
                    start = done.get(name, 0)
                    done[name] = start + count
                    part = slice(place, place + count)
                    yield from _cut(name, shapes[name], start, flat, moments, part)

    # -------------------------------------------------------------------------------------------------------- stage 3
    def _stage3_pieces(self) -> Iterator[Piece]:
        world_size = len(self._partitions)
        for rank, states in enumerate(self._partitions):
            flats = states["fp32_flat_groups"]
            kept = states["optimizer_state_dict"]["state"]
            moments = [kept.get(index, {}) for index in range(len(flats))]
            sub_group, position = 0, 0
            for name, shape in self.trained.items():
                numel = math.prod(shape)
                part = -(-numel // world_size)
                start, taken = rank * part, 0
                while taken < part:  # a parameter's part may go on in the next sub-group
                    if position == len(flats[sub_group]):
                        sub_group, position = sub_group + 1, 0
                    count = min(part - taken, len(flats[sub_group]) - position)
                    real = max(0, min(count, numel - start - taken))
                    if real:
                        cut = slice(position, position + real)
                        yield from _cut(name, shape, start + taken, flats[sub_group], moments[sub_group], cut)
                    taken += count
                    position += count

    # ------------------------------------------------------------------------------------------------------ universal
    def _universal_pieces(self) -> Iterator[Piece]:
        for name, shape in self.trained.items():
            folder = self.folder / "zero" / name
            if not folder.is_dir():
                raise CheckpointError(f"the universal checkpoint {self.folder} lacks the parameter '{name}'")
            found = set()
            for file in sorted(folder.glob("*.pt")):
                content = load_inert(file)
                value = content["param"] if isinstance(content, dict) else content
                if not isinstance(value, torch.Tensor):
                    value = torch.tensor(float(value))
                found.add(file.stem)
                if file.stem == "fp32":
                    yield Piece(f"model.{name}", shape, 0, value.reshape(-1)[: math.prod(shape)])
                elif file.stem == "step":
                    yield Piece(f"optimizer.state.{name}.step", (), 0, value.reshape(1).float())
                else:
                    yield Piece(f"optimizer.state.{name}.{file.stem}", shape, 0, value.reshape(-1)[: math.prod(shape)])
            step = self._universal_step()
            if "step" not in found and step is not None:
                yield Piece(f"optimizer.state.{name}.step", (), 0, step)

    def _universal_step(self) -> torch.Tensor | None:
        inner = self._partitions[0].get("optimizer_state_dict", {}) if self._partitions else {}
        for state in inner.get("state", {}).values():
            if "step" in state:
                return torch.as_tensor(state["step"], dtype=torch.float32).reshape(1)
        return None


def _cut(
    name: str, shape: tuple[int, ...], start: int, flat: torch.Tensor, moments: dict[str, Any], part: slice
) -> Iterator[Piece]:
    """A parameter's pieces in one flat partition: master, moments, and with the first element the step count."""
    yield Piece(f"model.{name}", shape, start, flat[part])
    for key, value in moments.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == len(flat):
            yield Piece(f"optimizer.state.{name}.{key}", shape, start, value[part])
        elif start == 0 and isinstance(value, torch.Tensor | int | float):
            number = torch.as_tensor(value, dtype=torch.float32).reshape(1)
            yield Piece(f"optimizer.state.{name}.{key}", (), 0, number)


# ------------------------------------------------------------------------------------------------------------- opening
def open_deepspeed(folder: Path) -> DeepSpeedCheckpoint:
    """Open the folder of one tag. Raises CheckpointError naming the file that is missing or of an unknown kind."""
    universal = (folder / "zero").is_dir()
    model_files = _by_rank(folder, r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
    if not model_files:
        raise CheckpointError(f"{folder} holds no DeepSpeed checkpoint: there is no *mp_rank_00_model_states.pt")
    if list(folder.glob("*mp_rank_01_*")):
        raise CheckpointError(
            f"{folder} was saved with tensor parallelism; onecopy imports checkpoints of data parallelism only"
        )
    states = [load_inert(path) for path in model_files]
    first = states[0]
    groups = [{n: tuple(s) for n, s in group.items()} for group in first.get("param_shapes") or []]
    checkpoint = DeepSpeedCheckpoint(folder, 0, first, groups, {}, _universal=universal)
    shapes = first.get("frozen_param_shapes") or {}
    checkpoint.frozen = {name: tuple(shape) for name, shape in shapes.items()}
    checkpoint._others = states
    if universal:
        path = folder / "zero" / "optimizer_state.pt"
        inner = load_inert(path) if path.exists() else {}
        checkpoint._partitions = [inner] if inner else []
    else:
        files = _by_rank(folder, r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
        world_size = int(first.get("dp_world_size") or len(files))
        if files and len(files) != world_size:
            raise CheckpointError(
                f"{folder} has optimizer states of {len(files)} ranks and was saved by {world_size}; the others are missing"
            )
        checkpoint._partitions = [load_inert(path)["optimizer_state_dict"] for path in files]
    if checkpoint._partitions:
        _take_options(checkpoint, checkpoint._partitions[0])
    if checkpoint.stage == 3 and not universal and len(states) != len(checkpoint._partitions):
        raise CheckpointError(
            f"{folder} has model states of {len(states)} ranks and optimizer states of {len(checkpoint._partitions)}"
        )
    return checkpoint


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    found = []
    for path in folder.iterdir():
        match = re.fullmatch(pattern, path.name)
        if match:
            found.append((int(match[1] or 0), path))
    found.sort()
    ranks = [rank for rank, _ in found]
    if ranks != list(range(len(ranks))):
        missing = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
        raise CheckpointError(f"{folder} lacks the file of rank {missing} that belongs to {found[0][1].name}")
    return [path for _, path in found]


def _take_options(checkpoint: DeepSpeedCheckpoint, inner: dict[str, Any]) -> None:
    stage = inner.get("zero_stage", 0)
    checkpoint.stage = int(stage.arguments[0]) if isinstance(stage, Inert) else int(stage)
    base = inner.get("base_optimizer_state") or inner.get("optimizer_state_dict") or inner
    groups = base.get("param_groups", []) if isinstance(base, dict) else []
    checkpoint.options = [
        {k: v for k, v in group.items() if k != "params" and not isinstance(v, Inert)} for group in groups
    ]
    scaler = inner.get("loss_scaler")
    if isinstance(scaler, Inert):
        checkpoint.loss_scaler = scaler.state
