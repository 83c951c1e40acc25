"""`plan(...)`: one model on one machine, the chosen setting rehearsed whole, all others beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onecopy.errors import PlanError
from onecopy.observe.ledger import CATEGORIES
from onecopy.plan.advisor import Choice, judge, largest_micro_batch, rate_of, recomputed, search, sentences
from onecopy.plan.estimate import Estimator
from onecopy.plan.extended import Extended
from onecopy.plan.hardware import Machine, machine
from onecopy.plan.models import subject_for
from onecopy.plan.rehearsal import Rehearsal, Subject
from onecopy.plan.tape import Tape
from onecopy.plan.timing import Played, chrome_trace, play, rates_for
from onecopy.plan.unseen import GIB, NOT_IN_NUMBERS, Unseen, unseen
from onecopy.plan.wanted import STAGES, document_of, setting_of, stage_written


@dataclass
class Plan:
    """The answer. Memory in bytes a GPU, times in seconds.

    Attributes:
        chosen: the setting that was rehearsed whole, with its verdict.
        stages: the same setting at every stage; `settings` the advisor's table, where it was asked for.
        largest_micro_batch: by upper bound, by stage.
    """

    subject: Subject
    machine: Machine
    sequence: int
    numel: int
    model_bytes: int
    chosen: Choice
    rehearsal: Rehearsal | Extended
    played: Played
    unseen: list[Unseen]
    stages: list[Choice]
    largest_micro_batch: dict[int, int]
    settings: list[Choice] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    base: dict[str, Any] | None = None

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return self.rehearsal.at_peak()

    def config(self) -> dict[str, Any]:
        """The DeepSpeed-style JSON this plan recommends."""
        best = next((choice for choice in self.settings if choice.fits), self.chosen)
        document = best.setting.config(self.base)
        document["train_batch_size"] = best.setting.micro_batch * best.setting.accumulation * self.machine.count
        return document

    def as_dict(self) -> dict[str, Any]:
        """Everything for machines; units are in the names."""
        return {
            "model": self.subject.name, "parameters": self.numel, "model_bytes": self.model_bytes, "gpus": str(self.machine),
            "gpu_memory_bytes": int(self.machine.gpu.memory), "sequence_tokens": self.sequence,
            "rate_unit": rate_of(self.subject),
            "chosen": self.chosen.row(), "peak_bytes_by_category": self.peak, "resting_bytes_by_category": self.rehearsal.resting,
            "holders": [{"module": m, "category": c, "bytes": b} for m, c, b in self.rehearsal.holders()],
            "unseen": [
                {"level": u.level, "name": u.name, "guess_bytes": u.guess, "bound_bytes": u.bound, "source": u.source, "flag": u.flag}
                for u in self.unseen
            ],
            "sent": self.rehearsal.windows[-1].sent,
            "stages": [choice.row() for choice in self.stages], "largest_micro_batch": self.largest_micro_batch,
            "settings": [choice.row() for choice in self.settings], "advice": self.advice, "config": self.config(),
        }  # fmt: skip

    def text(self) -> str:
        """The answer for people."""
        return "\n".join(_lines(self))

    def write(self, path: str | Path) -> None:
        """Write the recommended configuration."""
        Path(path).write_text(json.dumps(self.config(), indent=2) + "\n", encoding="utf-8")

    def trace(self) -> dict[str, Any]:
        """The three lanes as a chrome trace."""
        return chrome_trace(self.played)


def plan(
    model: Any,
    gpus: str | Machine = "8xA100-80GB",
    sequence: int | None = None,
    micro_batch: int | None = None,
    stage: int | None = None,
    accumulation: int | None = None,
    checkpointing: str | int | None = None,
    precision: str | None = None,
    config: dict[str, Any] | str | Path | None = None,
    advise: bool = False,
    global_batch: int | None = None,
    hardware: str | Path | None = None,
    per_node: int = 8,
    overrides: dict[str, Any] | None = None,
    compiled: bool = False,
) -> Plan:
    """Plan training of `model` on `gpus`, without either. Not collective; needs a process outside any world.

    Args:
        model: a name (see `subject_for`) or a `Subject`.
        sequence: tokens a sample; default: the model's longest, at most 4096.
        micro_batch, accumulation, checkpointing, precision: default: what `config` says, else 1, 1, "none" and "bf16".
        stage: default: what `config` says, else the lowest that fits, or 3.
        checkpointing: what the key `onecopy.checkpoint_activations` can be.
        config: the user's own document, or its path; the plan keeps its keys.
        advise: search all settings, for `global_batch` samples a step where that is given.
        overrides: `context`, `communication` (bytes) and `fragmentation` (a share) in place of the defaults of `unseen`.
        compiled: units are compiled, as `engine.compile()` does. Changes times alone: memory is planned without, which is a bound.

    Raises:
        PlanError: something cannot be planned; the message says what to change.
    """
    subject = subject_for(model)
    where = gpus if isinstance(gpus, Machine) else machine(gpus, per_node, hardware)
    if sequence is not None and sequence < 1:
        raise PlanError(f"a sample of {sequence} tokens cannot be planned; give at least 1 (--seq)")
    if global_batch is not None and (global_batch < 1 or global_batch % where.count):
        near = max(1, round(global_batch / where.count)) * where.count
        raise PlanError(
            f"a global batch of {global_batch} samples cannot be shared equally by {where.count} GPUs; {near} can"
        )
    length = sequence or subject.sequence or 1
    base = document_of(config)
    overrides = {"context": where.gpu.context, "communication": where.gpu.communication, "gpu": where.gpu.name} | {
        name: value for name, value in (overrides or {}).items() if value is not None
    }
    setting = setting_of(base, where.count, stage, micro_batch, accumulation, checkpointing, precision)
    setting = replace(setting, compiled=compiled)
    estimator = Estimator(subject, where.count, length, base)
    rates = rates_for(where.gpu)
    stages = [judge(estimator, replace(setting, stage=one), where, rates, overrides) for one in STAGES]
    if stage is None and stage_written(base) is None:
        setting = replace(
            setting, stage=next((c.setting.stage for c in stages[1:] if c.fits), 3) if where.count > 1 else 0
        )
    tape = Tape()
    rehearsal = estimator.whole(replace(setting, accumulation=min(2, setting.accumulation)), tape)
    largest = {one: largest_micro_batch(estimator, replace(setting, stage=one), where, overrides) for one in STAGES}
    chosen = judge(estimator, setting, where, rates, overrides, peak=rehearsal.peak)
    answer = Plan(
        subject, where, length, rehearsal.numel, rehearsal.model_bytes, chosen, rehearsal,
        play(tape.events, where, rates, compiled), unseen(rehearsal.peak, where.count, **overrides), stages, largest, base=base,
    )  # fmt: skip
    if advise:
        answer.settings = search(estimator, where, rates, setting, global_batch, overrides)
        answer.advice = sentences(answer.settings, estimator, where)
    elif not chosen.fits:
        answer.advice = sentences(stages, estimator, where)
    return answer


_LEVELS = (("allocated", "allocated"), ("reserved", "reserved"), ("device", "on the device"))


def _lines(p: Plan) -> list[str]:
    s, chosen = p.chosen.setting, p.chosen
    lines = [
        f"{p.subject.name}: {_count(p.numel)} parameters on {p.machine} ({p.machine.gpu.memory / GIB:.1f} GiB each)",
        f"stage {s.stage}, micro-batch {s.micro_batch}, {f'{p.sequence} tokens a sample, ' if p.subject.sequence else ''}accumulation "
        f"{s.accumulation}, {recomputed(s.checkpointing)}, {s.precision}{', compiled by engine.compile()' if s.compiled else ''}",
        "",
        "Memory a GPU at the peak",
    ]
    lines += [f"  {name:<18} {_gib(p.peak[name])}" for name in CATEGORIES if p.peak[name]]
    lines += [f"  {'allocated':<18} {_gib(chosen.allocated)}   counted by the ledger, nothing estimated"]
    lines += ["  not seen by the ledger (guess, upper bound):"]
    lines += [f"    {u.name:<26} {_gib(u.guess)} {_gib(u.bound)}   {u.source}" for u in p.unseen]
    verdict = (
        f"fits, {chosen.headroom / GIB:.1f} GiB spare"
        if chosen.fits
        else f"DOES NOT FIT: {-chosen.headroom / GIB:.1f} GiB too much"
    )
    lines += [
        "",
        "                     best guess  upper bound",
        *(
            f"  {said:<18} {_gib(chosen.memory[level].guess)}  {_gib(chosen.memory[level].bound)}"
            for level, said in _LEVELS
        ),
        f"  of {p.machine.gpu.memory / GIB:.2f} GiB: {verdict}, judged by the upper bound",
        "",
        "Held by",
    ]
    lines += [f"  {_gib(b)}  {c:<16} {m or '(engine)'}" for m, c, b in p.rehearsal.holders(6)]
    rate = f"{rate_of(p.subject)}/GPU"
    lines += ["", f"stage   allocated     bound  fits  largest micro-batch   step time {rate:>13}    MFU  exposed"]
    for c in p.stages:
        lines.append(
            f"{c.setting.stage:>5} {_gib(c.allocated)} {_gib(c.bound)}  {'yes' if c.fits else 'no ':<4} "
            f"{p.largest_micro_batch[c.setting.stage]:>20} "
            f"{c.seconds:>9.3f} s {c.tokens_per_second:>13,.0f} {c.mfu:>6.1%} {c.exposed:>6.3f} s"
        )
    if chosen.host_bound:
        lines.append(
            "the step is as long as the host takes to start its operators: a larger micro-batch costs little time"
        )
    if p.settings:
        lines += [
            "",
            f"   stage  micro  accumulation  checkpointing  slots    bucket       bound    headroom   step time {rate:>13}  why",
        ]
        for number, c in enumerate(p.settings[:16]):
            t = c.setting
            lines.append(
                f"{'->' if number == 0 and c.fits else '  '} {t.stage:>5} {t.micro_batch:>6} {t.accumulation:>13}  "
                f"{t.checkpointing:<13} {t.slots:>6} {t.bucket or 'as given':>9} {_gib(c.bound)} "
                f"{_gib(c.headroom)} {c.seconds:>9.3f} s {c.tokens_per_second:>13,.0f}  {c.why}"
            )
    lines += ["", *p.advice] if p.advice else []
    return [*lines, "", "Not in the numbers:", *(f"  {text}" for text in NOT_IN_NUMBERS)]


def _count(numel: int) -> str:
    size, word = next(
        ((s, w) for s, w in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")) if numel >= s), (1, "")
    )
    return f"{numel / size:.2f} {word}" if word else str(numel)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:>7.2f} GiB"
