"""Which settings to take: every combination judged by its upper bound, the fastest that fits marked, and the reasons said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onecopy.plan.estimate import Estimator, Setting, share_computed_again
from onecopy.plan.hardware import Machine
from onecopy.plan.impossible import at_least, utilisation
from onecopy.plan.rehearsal import Subject
from onecopy.plan.timing import Rates
from onecopy.plan.unseen import GIB, Interval, intervals, unseen
from onecopy.plan.wanted import STAGES


@dataclass
class Choice:
    """One row of the table; memory in bytes a GPU, time in seconds an optimizer step.

    Attributes:
        allocated: what the ledger counted; `memory` has a guess and a bound of all there is, by level (see `unseen`).
        bound: of all that the device holds, which `fits` is judged by.
        host_bound: the host takes longer to start the operators than the GPU to run them.
    """

    setting: Setting
    allocated: int
    memory: dict[str, Interval]
    fits: bool
    headroom: int
    seconds: float
    tokens_per_second: float
    mfu: float
    exposed: float
    host_bound: bool = False
    why: str = ""

    @property
    def reserved(self) -> int:
        """The best guess of what torch's allocator reserves."""
        return self.memory["reserved"].guess

    @property
    def bound(self) -> int:
        return self.memory["device"].bound

    def row(self) -> dict[str, Any]:
        s = self.setting
        return {
            "stage": s.stage, "micro_batch": s.micro_batch, "accumulation": s.accumulation, "checkpointing": s.checkpointing,
            "slots": s.slots, "bucket_elements": s.bucket, "compiled": s.compiled, "fits": self.fits, "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved, "bound_bytes": self.bound,
            **{f"{level}_{end}_bytes": getattr(found, end) for level, found in self.memory.items() for end in ("guess", "bound")},
            "headroom_bytes": self.headroom, "step_seconds": self.seconds, "tokens_per_second_per_gpu": self.tokens_per_second,
            "mfu": self.mfu, "exposed_communication_seconds": self.exposed, "host_bound": self.host_bound, "why": self.why,
        }  # fmt: skip


def judge(
    estimator: Estimator,
    setting: Setting,
    machine: Machine,
    rates: Rates,
    overrides: dict[str, Any] | None = None,
    peak: int | None = None,
) -> Choice:
    """Memory, time and verdict of one setting."""
    allocated = estimator.peak(setting) if peak is None else peak
    at_least(allocated, estimator.floor(setting), f"stage {setting.stage} on {machine}")
    memory = intervals(allocated, unseen(allocated, machine.count, **(overrides or {})))
    spare = int(machine.gpu.memory) - memory["device"].bound
    played = estimator.played(setting, machine, rates)
    tokens = setting.micro_batch * setting.accumulation * max(1, estimator.sequence)
    again = 1 + share_computed_again(setting.checkpointing) / 3
    mfu = utilisation(played.flops / again, played.seconds, machine.gpu.flops, f"stage {setting.stage} on {machine}")
    return Choice(
        setting, allocated, memory, spare >= 0, spare,
        played.seconds, tokens / played.seconds, mfu, played.exposed, played.host > played.lanes,
    )  # fmt: skip


def largest_micro_batch(
    estimator: Estimator, setting: Setting, machine: Machine, overrides: dict[str, Any] | None = None, most: int = 4096
) -> int:
    """The largest micro-batch whose upper bound fits; 0 when even one sample does not."""

    def fits(size: int) -> bool:
        allocated = estimator.peak(replace(setting, micro_batch=size))
        return (
            allocated + sum(part.bound for part in unseen(allocated, machine.count, **(overrides or {})))
            <= machine.gpu.memory
        )

    if not estimator.extends(setting) or not fits(1):
        return 1 if fits(1) else 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search(
    estimator: Estimator,
    machine: Machine,
    rates: Rates,
    like: Setting,
    global_batch: int | None = None,
    overrides: dict[str, Any] | None = None,
) -> list[Choice]:
    """Every stage and checkpointing with its largest useful micro-batch and half of it; fastest first among those that fit.

    Args:
        like: says what is not searched (precision, slots, compiled or not).
    """
    choices = []
    share = max(1, (global_batch or 0) // machine.count)
    for stage in STAGES:
        for checkpointing in estimator.checkpointings(like):
            setting = replace(like, stage=stage, micro_batch=1, accumulation=1, checkpointing=checkpointing)
            largest = largest_micro_batch(estimator, setting, machine, overrides, most=share if global_batch else 64)
            for size in sorted({max(1, largest), max(1, largest // 2)}):
                if global_batch:
                    while share % size:
                        size -= 1
                accumulation = share // size if global_batch else 1
                choices.append(
                    judge(
                        estimator,
                        replace(setting, micro_batch=size, accumulation=accumulation),
                        machine,
                        rates,
                        overrides,
                    )
                )
    ranked = _ranked(choices)
    if ranked[0].fits and ranked[0].setting.stage == 3 and estimator.subject.shrink is not None:
        ranked = _ranked([*choices, *_around(ranked[0], estimator, machine, rates, overrides)])
    for choice in ranked:
        choice.why = _why(choice, machine)
    return ranked


def _ranked(choices: list[Choice]) -> list[Choice]:
    """Each setting once: the fastest that fits first, then what misses by least; of equals the one with fewer slots."""
    unique = {choice.setting: choice for choice in choices}
    return sorted(
        unique.values(),
        key=lambda c: (not c.fits, -round(c.tokens_per_second, 1) if c.fits else c.bound, c.setting.slots),
    )


def _around(
    best: Choice, estimator: Estimator, machine: Machine, rates: Rates, overrides: dict[str, Any] | None
) -> list[Choice]:
    """The best setting of stage 3 with other slots and buckets: these depend little on the rest, so one place is enough to look at."""
    found: list[Choice] = []
    changes: tuple[dict[str, Any], ...] = (
        {"slots": 3}, {"slots": 4}, {"bucket": 200_000_000}, {"slots": 3, "bucket": 200_000_000},
    )  # fmt: skip
    for change in changes:
        found.append(judge(estimator, replace(best.setting, **change), machine, rates, overrides))
    return found


def _why(choice: Choice, machine: Machine) -> str:
    if not choice.fits:
        return f"{-choice.headroom / GIB:.1f} GiB too much"
    if choice.host_bound:
        return "the host starts operators no faster: larger micro-batches cost little time"
    share = choice.exposed / choice.seconds
    if share > 0.2:
        return f"{share:.0%} of the step waits for communication"
    if choice.setting.slots != 2:
        return f"{choice.setting.slots} slots: gathers run further ahead"
    if choice.setting.checkpointing != "none":
        return "recomputes to save activations"
    return "no recomputation, little waiting"


def recomputed(how: str | int) -> str:
    """A setting's checkpointing in words."""
    if isinstance(how, int):
        return f"one block in {how} checkpointed"
    return "no checkpointing" if how == "none" else f"{how} checkpointing"


def rate_of(subject: Subject) -> str:
    """What a throughput is of: a sample has tokens, or it has none."""
    return "tokens/s" if subject.sequence else "samples/s"


def sentences(ranked: list[Choice], estimator: Estimator, machine: Machine) -> list[str]:
    """The advice in words."""
    fitting = [choice for choice in ranked if choice.fits]
    said = []
    if not fitting:
        least = min(ranked, key=lambda c: c.bound)
        said.append(
            f"Nothing fits {machine}: the smallest setting (stage {least.setting.stage}, "
            f"{recomputed(least.setting.checkpointing)}, micro-batch "
            f"{least.setting.micro_batch}) needs up to {least.bound / GIB:.1f} GiB of {machine.gpu.memory / GIB:.1f} GiB a GPU."
        )
        said.append(_smallest_change(estimator, least.setting, machine))
        return said
    best = fitting[0]
    said.append(
        f"Take stage {best.setting.stage} with micro-batch {best.setting.micro_batch} and "
        f"{recomputed(best.setting.checkpointing)}: the fastest that "
        f"fits, {best.tokens_per_second:,.0f} {rate_of(estimator.subject)} a GPU, up to {best.bound / GIB:.1f} GiB."
    )
    per_stage = {stage: next((c for c in fitting if c.setting.stage == stage), None) for stage in STAGES}
    two, three = per_stage[2], per_stage[3]
    if two and three:
        gain = three.tokens_per_second / two.tokens_per_second - 1
        said.append(
            "Stage 2 fits and stage 3 is as fast: prefer stage 2, it sends less." if abs(gain) < 0.01 else
            f"Stage 2 fits: stage 3 would be {abs(gain):.0%} "
            f"{'faster (its memory buys a larger micro-batch)' if gain > 0 else 'slower (it gathers weights twice a step)'}; "
            "prefer stage 2 while it fits and is not slower."
        )  # fmt: skip
    elif three:
        said.append("Stage 2 does not fit, so stage 3 pays: its weights are sharded too.")
    none = [c for c in ranked if c.setting.checkpointing == "none" and c.setting.stage == best.setting.stage]
    full = [c for c in ranked if c.setting.checkpointing == "full" and c.setting.stage == best.setting.stage]
    if none and full and estimator.subject.shrink is not None:
        one = replace(none[0].setting, micro_batch=1)
        saved = estimator.peak(one) - estimator.peak(replace(one, checkpointing="full"))
        rates_ = none[0].tokens_per_second / full[0].tokens_per_second - 1
        said.append(
            f"Full checkpointing saves {saved / GIB:.1f} GiB a sample and costs about {max(0.0, rates_):.0%} of "
            "speed at the best micro-batch of each."
        )
    if best.exposed > 0.2 * best.seconds:
        said.append(
            f"{best.exposed / best.seconds:.0%} of the step waits for communication over "
            f"{machine.gpu.link / 1e9:.0f} GB/s links: larger micro-batches, "
            "more accumulation at stage 2, or NVLink would hide it."
        )
    return said


def _smallest_change(estimator: Estimator, setting: Setting, machine: Machine) -> str:
    """The first that fits: stage 3 with full checkpointing here, then the same on twice as many GPUs, and so on."""
    how = "full" if "full" in estimator.checkpointings(setting) else "none"
    wanted = replace(setting, stage=3, checkpointing=how, micro_batch=1)
    count = machine.count
    while count <= 16_384:
        other = Estimator(estimator.subject, count, estimator.sequence, estimator.base)
        other._shallow = estimator._shallow  # activations do not depend on the world
        allocated = other.peak(wanted)
        if allocated + sum(part.bound for part in unseen(allocated, count, gpu=machine.gpu.name)) <= machine.gpu.memory:
            where = f"{count} GPUs of this kind at stage 3" if count > machine.count else "stage 3"
            return f"The smallest change that fits: {where}, {recomputed(how)} and micro-batch 1."
        count *= 2
    return "More GPUs alone do not help (activations or slots of one GPU are too large): use shorter sequences or larger GPUs."
