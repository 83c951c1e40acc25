"""Many settings from few rehearsals: the state of the whole model, and two shallow depths and two micro-batches for the rest.

Blocks of one shape cost the same, so beyond two of them memory and time grow by a constant a block, and everything that
grows with the micro-batch does so by a constant a sample. The training state needs no such argument: the engine builds
it for the whole model. A single setting can be rehearsed whole instead (`exact`), which is what the answer shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onecopy.engine.whereabouts import block_of
from onecopy.errors import ModelError, OneCopyError, PlanError
from onecopy.plan.depths import SHALLOW, Pattern, depths_of, pattern_of, turns
from onecopy.plan.extended import DEEP, Extended
from onecopy.plan.hardware import Machine
from onecopy.plan.loops import Watchful
from onecopy.plan.rehearsal import Rehearsal, Subject, rehearse
from onecopy.plan.tape import Event, Tape, between
from onecopy.plan.timing import Played, Rates, play
from onecopy.plan.virtual import virtual_world

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Setting:
    """What is chosen; `precision` is "bf16", "fp16" or "fp32", `checkpointing` what `onecopy.checkpoint_activations` can be."""

    stage: int = 3
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str | int = "none"
    precision: str = "bf16"
    slots: int = 2
    bucket: int | None = None  # elements, of reduces and of gathering ahead; None keeps the document's
    compiled: bool = False  # units are compiled, as `engine.compile()` does; time only, memory is planned without

    def config(self, base: dict[str, Any] | None = None) -> dict[str, Any]:
        """The DeepSpeed-style JSON of this setting, over the user's own document."""
        document: dict[str, Any] = {key: value for key, value in (base or {}).items() if key != "train_batch_size"}
        document["train_micro_batch_size_per_gpu"] = self.micro_batch
        document["gradient_accumulation_steps"] = self.accumulation
        document["zero_optimization"] = {**document.get("zero_optimization", {}), "stage": self.stage}
        document.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-4}})
        for kind in ("bf16", "fp16"):
            block = "bfloat16" if kind == "bf16" and "bfloat16" in document else kind
            if kind == self.precision or block in document:
                document[block] = {**document.get(block, {}), "enabled": kind == self.precision}
        if self.bucket is not None:
            buckets = {"reduce_bucket_size": self.bucket, "stage3_prefetch_bucket_size": self.bucket}
            zero = document["zero_optimization"]
            document["zero_optimization"] = {
                key: v for key, v in zero.items() if key != "prefetch_bucket_size"
            } | buckets
        own = document.get("onecopy", {})
        chosen = {"slots": (self.slots, 2), "checkpoint_activations": (self.checkpointing, "none")}
        written = {name: value for name, (value, default) in chosen.items() if value != default or name in own}
        if written:
            document["onecopy"] = {**own, **written}
        return document


def exact(
    subject: Subject,
    setting: Setting,
    world_size: int,
    sequence: int,
    base: Any = None,
    windows: int = 1,
    tape: Tape | None = None,
    accelerator: bool = True,
) -> Rehearsal:
    """Rehearse one setting with the whole model."""
    config = _silent(setting.config(base))
    with virtual_world(world_size, accelerator), readable_errors(subject):
        return rehearse(
            subject, config, setting.micro_batch, sequence, windows=windows, warm=True, tape=tape,
            ledger=Watchful(subject.name, sequence),
        )  # fmt: skip


def _silent(document: dict[str, Any]) -> dict[str, Any]:
    """A rehearsal writes no files and prints nothing, whatever the user's document asks of a real run; rates of learning do not matter."""
    loud = (
        "steps_per_print", "dump_state", "memory_breakdown", "wall_clock_breakdown", "tensorboard", "csv_monitor", "wandb", "comet",
        "flops_profiler", "scheduler",
    )  # fmt: skip
    inner = {"onecopy": ("record", "trace_step"), "activation_checkpointing": ("profile",)}
    quiet = {key: value for key, value in document.items() if key not in loud}
    for block, keys in inner.items():
        if isinstance(quiet.get(block), dict):
            quiet[block] = {key: value for key, value in quiet[block].items() if key not in keys}
    return {**quiet, "steps_per_print": None}


@contextlib.contextmanager
def readable_errors(subject: Subject) -> Iterator[None]:
    """A model that fails, or reads values, which a plan has none of: say where in its code."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        place = _users_line(error)
        raise PlanError(
            f"{subject.name} reads a tensor's value during forward ({error.func}) at {place or 'an unknown place'}; a plan has no "
            "values: use torch.where or a fixed "
            "shape there, or give the model a flag that leaves that code out"
        ) from None
    except OneCopyError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        place = _users_line(error)
        raise PlanError(
            f"{subject.name} fails in its rehearsal with {type(error).__name__}: {reason}{f' (at {place})' if place else ''}; "
            "run its forward and backward once without onecopy to see the whole error"
        ) from error


def _users_line(error: BaseException) -> str:
    """The last line of the trace outside torch and onecopy, "" where there is none."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/onecopy/", "<frozen ", "/bin/")):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


Segment = tuple[str, str, str]  # (phase, stretch, "first" or "last" block or "")
Profile = list[
    tuple[Segment, int]
]  # at every birth of the window: where it was, and the bytes alive beyond the state before it


def profile_of(run: Rehearsal) -> Profile:
    """The last window, birth by birth."""
    window, ledger = run.windows[-1], run.ledger
    beyond = ledger.by_category(window.start)["batch"]
    blocks: dict[str, int] = {}
    profile: Profile = []
    for event in ledger.events[window.start : window.stop]:
        entry = ledger.entries[abs(event) - 1]
        if event < 0:
            beyond -= entry.nbytes
            continue
        beyond += entry.nbytes
        name = block_of(entry.module) if entry.stretch == "block" else ""
        if name:
            blocks.setdefault(name, len(blocks))
        profile.append(((entry.phase, entry.stretch, name), beyond))
    place = {
        name: "first" if order == 0 else "last" if order == len(blocks) - 1 else "" for name, order in blocks.items()
    }
    return [((phase, stretch, place.get(name, "")), size) for (phase, stretch, name), size in profile]


def share_computed_again(checkpointing: str | int) -> float:
    """The share of the forward that the backward repeats, selective checkpointing's cheap part left out."""
    return 1 / checkpointing if isinstance(checkpointing, int) else float(checkpointing == "full")


@dataclass
class Shallow:
    """What two depths and two micro-batches of one (stage, checkpointing) say about all others.

    The place of the peak moves with depth and micro-batch (activations where the backward begins, gradients where it
    ends), so every birth is extended by itself over micro-batches and every segment over depth, and the largest wins.
    """

    depths: tuple[int, int]
    world_size: int
    profiles: dict[tuple[int, int], Profile] = field(default_factory=dict)  # (depth, micro-batch)
    tapes: dict[tuple[int, int], list[Event]] = field(default_factory=dict)
    states: dict[int, dict[str, int]] = field(default_factory=dict)  # depth

    def extra_bytes(self, layers: int, micro_batch: int) -> int:
        """Bytes beyond the resting state at the peak."""
        low, high = self.depths
        small, large = (self._segments(depth, micro_batch) for depth in (low, high))
        more = (layers - high) / (high - low)
        return int(max(size + more * (size - small.get(segment, size)) for segment, size in large.items()))

    def _segments(self, depth: int, micro_batch: int) -> dict[Segment, int]:
        """Most bytes in each segment."""
        one, two = self.profiles[depth, 1], self.profiles[depth, 2]
        most: dict[Segment, int] = {}
        if [segment for segment, _ in one] == [segment for segment, _ in two]:
            sizes = [(segment, a + (micro_batch - 1) * (b - a)) for (segment, a), (_, b) in zip(one, two, strict=True)]
        else:  # the model took another path for the second sample: extend the segments instead
            first, second = _largest(one), _largest(two)
            sizes = [(s, first.get(s, b) + (micro_batch - 1) * (b - first.get(s, b))) for s, b in second.items()]
        for segment, size in sizes:
            most[segment] = max(size, most.get(segment, size))
        return most

    def seconds(self, layers: int, micro_batch: int, machine: Machine, rates: Rates, compiled: bool = False) -> Played:
        """One optimizer step of one micro-batch, extended to `layers`."""
        low, high = self.depths
        small, large = (
            play(between(self.tapes[d, 1], self.tapes[d, 2], micro_batch), machine, rates, compiled)
            for d in (low, high)
        )
        more = (layers - high) / (high - low)
        grown = {
            name: getattr(large, name) + more * (getattr(large, name) - getattr(small, name))
            for name in ("lanes", "host", "compute", "exposed", "gather", "reduce", "flops")
        }
        phases = {k: v + more * (v - small.by_phase.get(k, 0.0)) for k, v in large.by_phase.items()}
        return Played(**grown, by_phase=phases)


def _largest(profile: Profile) -> dict[Segment, int]:
    most: dict[Segment, int] = {}
    for segment, size in profile:
        most[segment] = max(size, most.get(segment, size))
    return most


def sizes_of(subject: Subject) -> tuple[int, int]:
    """(elements, bytes) of a model, built without memory and without an engine."""
    return _measured(subject)[:2]


def _measured(subject: Subject) -> tuple[int, int, Pattern]:
    """(elements, bytes, in what pattern its blocks repeat)."""
    with FakeTensorMode(), readable_errors(subject):
        model = subject.build()
        lists = (
            found for found in model.modules() if isinstance(found, nn.ModuleList) and len(found) == subject.layers
        )
        blocks = [
            sum(p.numel() for p in block.parameters()) for block in next(lists, ())
        ]  # of several classes, it may be
        pattern = pattern_of(blocks)
        nbytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        return sum(p.numel() for p in model.parameters()), nbytes, pattern


class Estimator:
    """Answers for any setting of one model on one world; rehearses what it needs once."""

    def __init__(self, subject: Subject, world_size: int, sequence: int, base: dict[str, Any] | None = None) -> None:
        self.subject = subject
        self.world_size = world_size
        self.sequence = sequence
        self.base = base
        self._states: dict[tuple[Any, ...], dict[str, int]] = {}
        self._whole: tuple[int, int, Pattern] | None = None
        self._equal: bool | None = None
        self._shallow: dict[tuple[Any, ...], Shallow] = {}

    def state(self, setting: Setting) -> dict[str, int]:
        """Bytes of the whole model's training state by category, without a forward.

        Built whole by the engine, except where a model of equal blocks says it: then two depths do, since each block adds as much.
        """
        key = (setting.stage, setting.precision, setting.slots, setting.bucket, setting.accumulation > 1)
        if key not in self._states:
            if self._blocks_are_equal():
                low, high = self._depths(setting)
                shallow = self.shallow(setting)
                if shallow.world_size == self.world_size:
                    small, large = shallow.states[low], shallow.states[high]
                else:  # what was rehearsed for another world says all but the state
                    small, large = (self._resting_of(self._shrunk(depth), setting) for depth in (low, high))
                more = (self.subject.layers - high) / (high - low)
                self._states[key] = {name: int(size + more * (size - small[name])) for name, size in large.items()}
            else:
                self._states[key] = self._resting_of(self.subject, setting)
        return self._states[key]

    def _resting_of(self, subject: Subject, setting: Setting) -> dict[str, int]:
        return exact(subject, replace(setting, micro_batch=1), self.world_size, 8, self.base, windows=0).resting

    def _shrunk(self, depth: int) -> Subject:
        assert self.subject.shrink is not None
        return self.subject.shrink(depth)

    def checkpointings(self, setting: Setting) -> tuple[str, ...]:
        """What checkpointing can be here: without repeated blocks, or where the model checkpoints by itself, only "none"."""
        one = self._shrunk(SHALLOW[0]) if self.subject.shrink is not None else self.subject
        try:
            self._resting_of(one, replace(setting, stage=0, checkpointing="full"))
        except ModelError:
            return ("none",)
        return CHECKPOINTING

    def sizes(self) -> tuple[int, int]:
        """(elements, bytes) of the whole model as built."""
        return self._measure()[:2]

    def _measure(self) -> tuple[int, int, Pattern]:
        if self._whole is None:
            self._whole = _measured(self.subject)
        return self._whole

    def _depths(self, setting: Setting) -> tuple[int, int]:
        return depths_of(self._measure()[2], self.subject.layers, setting.slots, setting.checkpointing)

    def extends(self, setting: Setting) -> bool:
        """Whether shallow versions of the model can stand for it; else every setting is rehearsed whole."""
        if self.subject.shrink is None:
            return False
        return self._measure()[2] == Pattern() or self._depths(setting)[1] <= self.subject.layers

    def _blocks_are_equal(self) -> bool:
        """Whether the whole model has as many elements as its shallow versions let expect, and blocks enough to tell."""
        if self._equal is None:
            low, high = self._depths(Setting())
            if self.subject.shrink is None or self.subject.layers <= high + 2:
                self._equal = False
            else:
                small, large = (sizes_of(self._shrunk(depth))[0] for depth in (low, high))
                expected = large + (self.subject.layers - high) * (large - small) // (high - low)
                self._equal = self.sizes()[0] == expected
        return self._equal

    def shallow(self, setting: Setting) -> Shallow:
        checkpointing, several = setting.checkpointing, setting.accumulation > 1
        key = (setting.stage, setting.precision, setting.slots, setting.bucket, checkpointing, several)
        if key not in self._shallow:
            depths = self._depths(setting)
            made = self._shallow[key] = Shallow(depths, self.world_size)
            for depth in depths:
                for batch in (1, 2):
                    tape = Tape()
                    small = replace(setting, micro_batch=batch, accumulation=min(2, setting.accumulation))
                    run = exact(self._shrunk(depth), small, self.world_size, self.sequence, self.base, tape=tape)
                    made.profiles[depth, batch] = profile_of(run)
                    made.tapes[depth, batch] = tape.events
                    if batch == 1:
                        made.states[depth] = run.ledger.by_category(run.windows[-1].start)
        return self._shallow[key]

    def peak(self, setting: Setting) -> int:
        """Bytes the ledger would show at the peak."""
        if not self.extends(setting):
            return exact(self.subject, setting, self.world_size, self.sequence, self.base).peak
        state = self.state(setting)
        extra = self.shallow(setting).extra_bytes(self.subject.layers, setting.micro_batch)
        return sum(state.values()) - state["batch"] + extra

    def floor(self, setting: Setting) -> int:
        """Bytes of weights, masters and moments that rest on a rank: no run of this setting can take less."""
        if self.subject.shrink is None:
            return 0
        state = self.state(setting)
        return sum(state[name] for name in ("parameters", "masters", "moments"))

    def whole(self, setting: Setting, tape: Tape) -> Rehearsal | Extended:
        """The setting rehearsed whole, or for a deep model of equal blocks extended from two depths; `tape` is of what ran."""
        every_nth = isinstance(setting.checkpointing, int)
        if self.subject.layers <= DEEP or every_nth or not self._blocks_are_equal():
            return exact(self.subject, setting, self.world_size, self.sequence, self.base, tape=tape)
        turn = self._measure()[2].period
        low = self._depths(setting)[0] + turns(2, turn)  # two blocks at each end, behind those that fill the slots
        high = low + turns(2, turn)
        small = exact(self._shrunk(low), setting, self.world_size, self.sequence, self.base)
        large = exact(self._shrunk(high), setting, self.world_size, self.sequence, self.base, tape=tape)
        return Extended(small, large, (low, high), self.subject.layers, self.peak(setting), *self.sizes())

    def played(self, setting: Setting, machine: Machine, rates: Rates) -> Played:
        """The time of one optimizer step."""
        single = replace(setting, accumulation=1)
        if not self.extends(single):
            tape = Tape()
            exact(self.subject, single, self.world_size, self.sequence, self.base, tape=tape)
            played = play(tape.events, machine, rates, setting.compiled)
        else:
            layers, size = self.subject.layers, setting.micro_batch
            played = self.shallow(single).seconds(layers, size, machine, rates, setting.compiled)
        more = setting.accumulation - 1
        if more:
            # Whole gradients (stages 0 and 1) are reduced once a window, sharded ones at every micro-batch.
            step = played.by_phase.get("step", 0.0)
            a_batch = played.lanes - step - (played.exposed if setting.stage < 2 else 0.0)
            for name in ("host", "compute", "flops", *(("gather", "reduce", "exposed") if setting.stage == 3 else ())):
                setattr(played, name, getattr(played, name) * (1 + more))
            played.lanes += more * a_batch
        return played
