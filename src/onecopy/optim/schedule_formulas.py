"""DeepSpeed's learning-rate schedules, written as closed formulas of the number of optimizer steps taken.

Each class computes the rates of all groups from `last_batch_iteration` alone, so its state is that one integer. They
work on any optimizer with `param_groups`, look the groups up at every step, and keep nothing else of it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

import torch

from onecopy.errors import ConfigError
from onecopy.observe.log import warn

PerGroup = float | Sequence[float]
"""One number for all groups, or one for each group."""


class Schedule:
    """Common part of DeepSpeed's schedules: the iteration counter, writing rates into groups, and the saved state.

    `last_batch_iteration` is -1 before the first `step()` and 0 after it. A fresh schedule writes its starting rate
    into the groups at once; one that is built with `last_batch_iteration >= 0` leaves them alone until `step()`.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{type(self).__name__} needs an optimizer with param_groups, got a {type(optimizer).__name__}; pass "
                "the optimizer that initialize() returned or a torch.optim.Optimizer."
            )
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates written last: by `step()`, or by the construction of a fresh schedule.

        AssertionError where nothing was written yet (OneCycle, or a schedule that continues), which trainers look for.
        """
        assert self._last_lr is not None, "need to call step() first: no optimizer step has been taken yet"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None, *, batch_iteration: int | None = None) -> None:
        """Goes to the next iteration, or to the given one, and writes the rates; once for each optimizer step."""
        given = batch_iteration if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if given is None else int(given)
        self._last_lr = self._write(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Continues at the saved iteration; the groups get its rates at once, even where theirs were not restored."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        if self.last_batch_iteration >= 0:
            self._last_lr = self._write(self.get_lr())

    def _write(self, rates: Sequence[float]) -> list[float]:
        # Not strict: a group that was added after construction keeps its own rate.
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a rate that a captured graph or a fused step reads must stay the same tensor
            else:
                group["lr"] = rate
        return list(rates)

    def _per_group(self, value: PerGroup, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if isinstance(value, (list, tuple)):
            if len(value) != groups:
                raise ConfigError(f"expected {groups} values for {name}, one for each group, got {len(value)}")
            return [_number(name, item) for item in value]
        return [_number(name, value)] * groups

    def _rate_of(self, group: dict[str, Any]) -> float:
        return float(group["lr"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(last_batch_iteration={self.last_batch_iteration}, lr={self._last_lr})"


class LRRangeTest(Schedule):
    """Raises the rate from a small value without end, to find where training diverges.

    lr = lr_range_test_min_lr x (1 + lr_range_test_step_rate x interval), interval = (t + 1) / lr_range_test_step_size,
    rounded down with `lr_range_test_staircase`.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive_integer("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._last_lr = self._write(self.min_lr)

    def get_lr(self) -> list[float]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * increase for low in self.min_lr]


class WarmupLR(Schedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then keeps it.

    With n = max(2, warmup_num_steps) the fraction of the way at iteration t < n is ln(t + 1) / ln(n) for "log", t / n
    for "linear". `warmup_max_lr` None means the rate that each group has at construction.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [self._rate_of(group) for group in optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, _positive_integer("warmup_num_steps", warmup_num_steps))
        self.warmup_type = _warmup_type(warmup_type)
        if last_batch_iteration == -1:
            self._last_lr = self._write(self.min_lrs)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        way = self._way()
        return [low + (high - low) * way for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _way(self) -> float:
        """The fraction of the way from the lowest to the highest rate."""
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmup_fraction(self.warmup_type, self.last_batch_iteration, self.warmup_num_steps)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a straight line down from `warmup_max_lr` that reaches `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _number("total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_short_total(self, self.total_num_steps, self.warmup_num_steps)

    def _way(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._way()
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(Schedule):
    """Scales each group's own rate: warmup from `warmup_min_ratio` to 1, then half a cosine down to `cos_min_ratio`.

    The rates scaled are those that the groups have at construction.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = _number("total_num_steps", total_num_steps)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.warmup_num_steps = max(2, _positive_integer("warmup_num_steps", warmup_num_steps))
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.warmup_type = _warmup_type(warmup_type)
        _warn_short_total(self, self.total_num_steps, self.warmup_num_steps)
        self.org_lrs = [self._rate_of(group) for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._last_lr = self._write(self.get_lr())

    def get_lr_ratio(self) -> float:
        """What the rates of all groups are multiplied by at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            way = _warmup_fraction(self.warmup_type, self.last_batch_iteration, self.warmup_num_steps)
            return self.warmup_min_ratio + way * (1.0 - self.warmup_min_ratio)
        steps = self.last_batch_iteration - self.warmup_num_steps + 1
        # Held at the end, or the cosine would rise again past total_num_steps.
        progress = min(1.0, steps / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class OneCycle(Schedule):
    """One cycle of the rate up and down again, momentum the other way round, then a decay.

    Up from `cycle_min_lr` to `cycle_max_lr` in `cycle_first_step_size` steps, down in `cycle_second_step_size`
    (default: the same); stair counts above 0 make each half that many flat stairs. Afterwards, with
    `decay_step_size` > 0 and i = steps since the end / decay_step_size: lr = cycle_min_lr / (1 + decay_lr_rate x i),
    momentum = cycle_max_mom x (1 + decay_mom_rate x i). Momentum is the first of a group's `betas`; the second becomes
    0.99, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first_step_size = float(_number("cycle_first_step_size", cycle_first_step_size))
        self.second_step_size = float(_number("cycle_second_step_size", second))
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ConfigError(
                f"cycle_first_step_size is {cycle_first_step_size}, cycle_second_step_size {second}; the first must be "
                "positive, the second at least 0."
            )
        self.total_size = self.first_step_size + self.second_step_size
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_stair_count = _number("cycle_first_stair_count", cycle_first_stair_count)
        self.second_stair_count = _number("cycle_second_stair_count", stairs)
        self.decay_step_size = _number("decay_step_size", decay_step_size)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and self._groups_have_betas()
        if last_batch_iteration == -1:
            self._write(self.min_lrs)
            self._write_momentum(self.min_moms)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale = self._height()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        if self._no_decay(self.decay_lr_rate):
            return list(self.min_lrs)
        return [low / (1 + self.decay_lr_rate * self._decay_intervals()) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The `betas` of each group at `last_batch_iteration`; None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        return [(momentum, 0.99) for momentum in self._momenta()]

    def step(self, last_batch_iteration: int | None = None, *, batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration, batch_iteration=batch_iteration)
        self._write_momentum(self._momenta())

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        super().load_state_dict(sd)
        if self.last_batch_iteration >= 0:
            self._write_momentum(self._momenta())

    def _momenta(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale = self._height()
            return [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        if self._no_decay(self.decay_mom_rate):
            return list(self.max_moms)
        return [high * (1 + self.decay_mom_rate * self._decay_intervals()) for high in self.max_moms]

    def _write_momentum(self, momenta: Sequence[float]) -> None:
        if not self.cycle_momentum:
            return
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
            group["betas"] = (momentum, 0.99)

    def _groups_have_betas(self) -> bool:
        if all("betas" in group for group in self.optimizer.param_groups):
            return True
        name = type(self.optimizer).__name__
        warn(f"OneCycle: cycle_momentum is off, because {name} has no betas; set cycle_momentum to false to say so.")
        return False

    def _height(self) -> float:
        """How far up the cycle is, 0 at its ends and 1 at its top."""
        iteration = self.last_batch_iteration + 1
        top = self.first_step_size / self.total_size
        position = 1.0 + iteration / self.total_size - math.floor(1 + iteration / self.total_size)
        rising = position <= top
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs <= 0:
            return position / top if rising else (position - 1) / (top - 1)
        # Stairs are cut from the whole number of steps: rounding could put the top just under the last stair.
        steps = iteration % self.total_size
        if steps <= self.first_step_size:
            return math.floor(steps * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - steps) * stairs / self.second_step_size) / stairs

    def _no_decay(self, rate: float) -> bool:
        return self.decay_step_size == 0 or rate == 0

    def _decay_intervals(self) -> float:
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


def _warmup_fraction(warmup_type: str, iteration: int, steps: int) -> float:
    if warmup_type == "log":
        return 1.0 / math.log(steps) * math.log(iteration + 1)
    return iteration / steps


def _warmup_type(value: str) -> str:
    if value in ("log", "linear"):
        return value
    near = difflib.get_close_matches(str(value), ("log", "linear"), n=1, cutoff=0.4)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    warn(f'warmup_type {value!r} is unknown{hint}; "log" is used. Known: "log", "linear".')
    return "log"


def _warn_short_total(schedule: Schedule, total: float, warmup: int) -> None:
    if total < warmup:
        name = type(schedule).__name__
        warn(f"{name}: total_num_steps {total} is less than warmup_num_steps {warmup}, so the rate never peaks.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fix = "write it without quotes" if isinstance(value, str) and value != "auto" else "write a number"
        raise ConfigError(f"{name} is {value!r}; {fix}.")
    return value


def _positive_integer(name: str, value: Any) -> int:
    number = _number(name, value)
    if number <= 0 or number != int(number):
        raise ConfigError(f"{name} must be a positive integer, got {value!r}.")
    return int(number)
