"""Timers that scripts start and stop by name; the engine has its own (`wall_clock_breakdown`)."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..accelerator import get_accelerator
from .logging import log_dist

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
TRAIN_BATCH_TIMER = "train_batch"


class _Timer:
    """Wall time between `start` and `stop`, in milliseconds; both wait for the device."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self.reset()

    def reset(self) -> None:
        self.started_ = False
        self._total = 0.0
        self.records: list[float] = []

    def start(self) -> None:
        assert not self.started_, f"{self.name_} timer has already been started"
        get_accelerator().synchronize()
        self._began = time.perf_counter()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        assert self.started_, "timer is not started"
        get_accelerator().synchronize()
        spent = (time.perf_counter() - self._began) * 1e3
        self._total = spent if reset else self._total + spent
        if record:
            self.records.append(spent)
        self.started_ = False

    def elapsed(self, reset: bool = True) -> float:
        running = self.started_
        if running:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        return trim_mean(self.records or [self._total], 0.1)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("step").start()`."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    @staticmethod
    def memory_usage() -> str:
        device, gib = get_accelerator(), 1024**3
        return f"mem_allocated: {device.memory_allocated() / gib:.4f} GB, max: {device.max_memory_allocated() / gib:.4f} GB"

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Say the times of these timers in milliseconds, on rank 0 unless said otherwise."""
        times = [
            f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        memory = f" | {self.memory_usage()}" if memory_breakdown else ""
        log_dist(f"time (ms) | {' | '.join(times)}{memory}", ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class NoopTimer:
    """A timer that does nothing, whatever it is called."""

    class Timer:
        def start(self, *_: Any, **__: Any) -> None: ...
        def stop(self, *_: Any, **__: Any) -> None: ...
        def reset(self) -> None: ...
        def elapsed(self, *_: Any, **__: Any) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Any:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(self, *_: Any, **__: Any) -> None: ...

    def get_mean(self, *_: Any, **__: Any) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Samples a second of `batch_size` samples between `start` and `stop(global_step=True)`."""

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or log_dist
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._began: float | None = None

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if self.global_step_count >= self.start_step:
            get_accelerator().synchronize()
            self._began = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if self._began is None:
            return
        get_accelerator().synchronize()
        self.total_elapsed_time += time.perf_counter() - self._began
        self._began = None
        if (
            global_step
            and report_speed
            and self.steps_per_output
            and not self.global_step_count % self.steps_per_output
        ):
            self.logging(f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples a second")

    def avg_samples_per_sec(self) -> float:
        """Over all steps timed so far; minus infinity before there is one."""
        steps = self.global_step_count - self.start_step
        return (
            self.batch_size * steps / self.total_elapsed_time
            if steps > 0 and self.total_elapsed_time
            else float("-inf")
        )


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without the smallest and largest share `trim_percent` of the numbers; 0 without any."""
    assert 0.0 <= trim_percent <= 1.0
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut] if cut else list(data)
    return sum(kept) / len(kept) if kept else 0.0


__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"]
