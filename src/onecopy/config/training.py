"""The `optimizer` and `scheduler` blocks: a type by name and its parameters, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onecopy.config.keys import Key, when
from onecopy.config.kinds import Choice, Integer, Kind, Number, Pair, PerGroup, Switch


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """`optimizer`: `type` is a name of `torch.optim` or one of DeepSpeed's; `params` go to its constructor."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`scheduler`: `type` is one of DeepSpeed's or a name of `torch.optim.lr_scheduler`; `params` configure it."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


REQUIRED = object()  # the default of a parameter that must be written


def _key(name: str, kind: Kind, effect: str, **options: Any) -> Key:
    return Key(kind, effect, name=name, **options)


def _by_name(*rows: tuple[Key, Any]) -> dict[str, tuple[Key, Any]]:
    return {row.name: (row, default) for row, default in rows}


OPTIMIZER_PARAMETERS = _by_name(
    (_key("lr", Number(0), "learning rate"), 1e-3),
    (_key("betas", Pair(), "decay rates of the moments"), [0.9, 0.999]),
    (_key("eps", Number(0), "added to the denominator"), 1e-8),
    (_key("weight_decay", Number(0), "weight decay"), 0.0),
    (_key("momentum", Number(0), "momentum"), 0.0),
    (_key("amsgrad", Switch(), "keep the maximum of the second moment"), False),
    (
        _key(
            "bias_correction",
            Switch(),
            "the moments' start at zero is corrected",
            judge=when(False, "refused", "torch's Adam always corrects the moments' start at zero; remove the key"),
        ),
        True,
    ),
    (_key("adam_w_mode", Switch(), "decoupled weight decay (AdamW); false gives L2"), True),
    (
        _key(
            "torch_adam",
            Switch(),
            "torch's own optimizer is always used, here with its own default weight decay",
            verdict="implied",
        ),
        False,
    ),
    (
        _key(
            "fp32_optimizer_states",
            Switch(),
            "moments are always fp32",
            verdict="implied",
            judge=when(False, "refused", "moments stay in fp32; remove the key"),
        ),
        True,
    ),
)
"""Optimizer parameters whose values are checked here; any other goes to the constructor as it is."""

_WARMUP = (
    (_key("warmup_num_steps", Integer(1, unit="steps"), "length of the warm-up"), 1000),
    (_key("warmup_type", Choice(("log", "linear")), "shape of the warm-up"), "log"),
    (_key("last_batch_iteration", Integer(-1, unit="steps"), "start after this step"), -1),
)
_TOTAL = (_key("total_num_steps", Integer(1, unit="steps"), "length of the whole schedule"), REQUIRED)

SCHEDULER_PARAMETERS: dict[str, dict[str, tuple[Key, Any]]] = {
    "WarmupLR": _by_name(
        (_key("warmup_min_lr", PerGroup(0), "learning rate at the start"), 0.0),
        (_key("warmup_max_lr", PerGroup(0), "learning rate after the warm-up", nullable=True), None),
        *_WARMUP,
    ),
    "WarmupDecayLR": _by_name(
        _TOTAL,
        (_key("warmup_min_lr", PerGroup(0), "learning rate at the start"), 0.0),
        (_key("warmup_max_lr", PerGroup(0), "learning rate after the warm-up", nullable=True), 0.001),
        *_WARMUP,
    ),
    "WarmupCosineLR": _by_name(
        _TOTAL,
        (_key("warmup_min_ratio", Number(0), "part of the learning rate at the start"), 0.0),
        (_key("cos_min_ratio", Number(0), "part of the learning rate at the end"), 1e-4),
        *_WARMUP,
    ),
    "OneCycle": _by_name(
        (_key("cycle_min_lr", PerGroup(0), "learning rate at both ends of the cycle"), REQUIRED),
        (_key("cycle_max_lr", PerGroup(0), "learning rate at the top of the cycle"), REQUIRED),
        (_key("decay_lr_rate", Number(0), "decay after the cycle"), 0.0),
        (_key("cycle_first_step_size", Integer(1, unit="steps"), "length of the rise"), 2000),
        (_key("cycle_second_step_size", Integer(1, unit="steps"), "length of the fall", nullable=True), None),
        (_key("cycle_first_stair_count", Integer(0), "stairs of the rise"), 0),
        (_key("cycle_second_stair_count", Integer(0), "stairs of the fall", nullable=True), None),
        (_key("decay_step_size", Integer(0, unit="steps"), "length of one decay step"), 0),
        (_key("cycle_momentum", Switch(), "cycle the momentum too"), True),
        (_key("cycle_min_mom", PerGroup(0, 1), "lowest momentum"), 0.8),
        (_key("cycle_max_mom", PerGroup(0, 1), "highest momentum"), 0.9),
        (_key("decay_mom_rate", Number(0), "decay of the momentum after the cycle"), 0.0),
        (_key("last_batch_iteration", Integer(-1, unit="steps"), "start after this step"), -1),
    ),
    "LRRangeTest": _by_name(
        (_key("lr_range_test_min_lr", PerGroup(0), "learning rate at the start"), 1e-3),
        (_key("lr_range_test_step_size", Integer(1, unit="steps"), "length of one rise"), 2000),
        (_key("lr_range_test_step_rate", Number(0), "rate of the rise"), 1.0),
        (_key("lr_range_test_staircase", Switch(), "rise in stairs"), False),
        (_key("last_batch_iteration", Integer(-1, unit="steps"), "start after this step"), -1),
    ),
}
