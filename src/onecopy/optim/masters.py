"""The masters as the optimizer sees them: flat fp32 runs of parameters that are stepped together.

A run is one tensor of the optimizer, with one state and one step count. It starts as all that one optimizer group owns of
a flat buffer's shard. A parameter that goes without a gradient on every rank must be left alone by the step, as in torch,
although its neighbours move; it then becomes a run of its own, with its own step count from there on. So torch's own rule
(no gradient, no step) does the rest, and no step reads a mask.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onecopy.optim.state import States
from onecopy.sharding import FlatBuffer, FlatGradient


@dataclass(eq=False, slots=True)
class Run:
    """Elements `[start, stop)` of a flat buffer, all in this rank's shard and in one optimizer group.

    Attributes:
        master: a view [stop - start] of the flat buffer's master; what `param_groups` hold.
    """

    flat: FlatBuffer
    group: int
    start: int
    stop: int
    master: nn.Parameter

    def local(self) -> slice:
        """The run's place in the master (and in the gradient shard), in elements."""
        base = 0 if self.flat.optimizer_whole else self.flat.own.start
        return slice(self.start - base, self.stop - base)


@dataclass(eq=False)
class Masters:
    """All runs of one engine, kept in step with the inner optimizer's `param_groups`.

    Attributes:
        left_out: names of the parameters that the step under way leaves alone; the same on every rank.
    """

    flats: list[FlatBuffer]
    optimizer: torch.optim.Optimizer
    runs: list[Run] = field(default_factory=list)
    left_out: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        flats, self.flats = self.flats, []
        self.include(flats)

    def include(self, flats: Iterable[FlatBuffer]) -> None:
        """Make runs of these flat buffers too; they start without optimizer state."""
        for flat in flats:
            self.flats.append(flat)
            low, high = (0, flat.numel) if flat.optimizer_whole else (flat.own.start, flat.own.stop)
            for group, start, stop in flat.group_spans:
                start, stop = max(start, low), min(stop, high)
                if start < stop:
                    self.runs.append(self._run(flat, group, start, stop))
        self._publish()

    @staticmethod
    def _run(flat: FlatBuffer, group: int, start: int, stop: int) -> Run:
        assert flat.master is not None
        base = 0 if flat.optimizer_whole else flat.own.start
        return Run(flat, group, start, stop, nn.Parameter(flat.master[start - base : stop - base]))

    def _publish(self) -> None:
        """Let each group's `params` be its runs; the group dictionaries stay, so schedulers keep what they hold."""
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [run.master for run in self.runs if run.group == index]

    def give_gradients(self, gradients: Iterable[FlatGradient], skipped: set[str]) -> None:
        """Hand every run its part of the gradient shard; runs of parameters named in `skipped` get none."""
        self.left_out = frozenset(skipped)
        shards = {gradient.flat.key: gradient.shard for gradient in gradients}
        if skipped:
            self.separate(skipped)
        for run in self.runs:
            shard = shards[run.flat.key]
            if shard is None or (skipped and self._name_of(run) in skipped):
                run.master.grad = None
            else:
                part = shard[run.local()]
                run.master.grad = part if part.dtype == run.master.dtype else part.to(run.master.dtype)

    def drop_gradients(self) -> None:
        for run in self.runs:
            run.master.grad = None

    # -------------------------------------------------------------------------------------------------------- splitting
    def _name_of(self, run: Run) -> str | None:
        """The parameter a run consists of, or None when it has several."""
        names = [
            name
            for name, r in zip(run.flat.names, run.flat.layout.ranges, strict=True)
            if _meet(run, r.start, r.aligned_stop)
        ]
        return names[0] if len(names) == 1 else None

    def separate(self, names: set[str]) -> None:
        """Make every named parameter's part a run of its own."""
        changed = False
        for flat in self.flats:
            for name, parameter in zip(flat.names, flat.layout.ranges, strict=True):
                if name in names:
                    for run in [
                        run
                        for run in self.runs
                        if run.flat is flat and _meet(run, parameter.start, parameter.aligned_stop)
                    ]:
                        changed |= self._split(run, parameter.start, parameter.aligned_stop)
        if changed:
            self._publish()

    def _split(self, run: Run, start: int, stop: int) -> bool:
        cuts = sorted({run.start, max(run.start, start), min(run.stop, stop), run.stop})
        if len(cuts) == 2:
            return False
        state = self.optimizer.state.pop(run.master, None)
        pieces = [self._run(run.flat, run.group, low, high) for low, high in itertools.pairwise(cuts)]
        if state is not None:
            for piece in pieces:
                part = slice(piece.start - run.start, piece.stop - run.start)
                self.optimizer.state[piece.master] = {
                    key: _part_of(value, part, run.master.numel()) for key, value in state.items()
                }
        place = self.runs.index(run)
        self.runs[place : place + 1] = pieces
        return True

    # ------------------------------------------------------------------------------------------------------------- state
    def restore(self, states: States) -> None:
        """Lay states by parameter name (each of the parameter's own shape) into the runs; parameters left out have none.

        Runs whose parameters differ in scalar state (a step count), or of which only some have state, are split.
        """
        for flat in self.flats:
            kinds = {name: _scalars(states.get(name)) for name in flat.names}
            if len(set(kinds.values())) > 1:
                self.separate(set(flat.names))
        for run in self.runs:
            filled: dict[str, Any] = {}
            for name, parameter in zip(run.flat.names, run.flat.layout.ranges, strict=True):
                if name in states and _meet(run, parameter.start, parameter.aligned_stop):
                    _lay(states[name], run, parameter.start, parameter.overlap(run.start, run.stop), filled)
            if filled:
                self.optimizer.state[run.master] = filled

    def state_nbytes(self) -> int:
        """Bytes of the optimizer's own tensors (moments, step counts) on this rank."""
        return sum(
            value.nbytes
            for run in self.runs
            for value in self.optimizer.state.get(run.master, {}).values()
            if isinstance(value, torch.Tensor)
        )

    def parts(self, flat: FlatBuffer, start: int, stop: int) -> list[tuple[Run, int, int]]:
        """The runs that hold elements of `[start, stop)` of a flat buffer, with the bounds of the part, in order."""
        return [
            (run, max(run.start, start), min(run.stop, stop))
            for run in self.runs
            if run.flat is flat and _meet(run, start, stop)
        ]


def _meet(run: Run, start: int, stop: int) -> bool:
    return run.start < stop and start < run.stop


def _scalars(state: dict[str, Any] | None) -> str:
    """What must be equal for two parameters to share a run."""
    if not state:
        return ""
    return repr(
        sorted(
            (key, float(value))
            for key, value in state.items()
            if not isinstance(value, torch.Tensor) or value.dim() == 0
        )
    )


def _lay(state: dict[str, Any], run: Run, start: int, part: tuple[int, int] | None, filled: dict[str, Any]) -> None:
    """Write one parameter's state into its place `part` (elements of the parameter) of a run's flat state.

    Of a parameter whose padding alone lies here (`part` None) there is nothing to write, but the run still needs a state:
    an optimizer that makes its states when it is built (Adagrad before torch 2.12) never makes one later.
    """
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if key not in filled:
                filled[key] = torch.zeros_like(run.master)
            if part is not None:
                low, high = part
                place = slice(start + low - run.start, start + high - run.start)
                filled[key][place] = value.reshape(-1)[low:high].to(run.master)
        else:
            filled[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _part_of(value: object, part: slice, numel: int) -> object:
    """A run's state for one part of it: elementwise state is cut, the rest (step counts) copied."""
    if isinstance(value, torch.Tensor):
        return value[part] if value.dim() == 1 and value.numel() == numel else value.clone()
    return value
