"""What the configuration's `flops_profiler` block asks for: one forward is counted module by module, and rank 0 reports it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from onecopy.config.services import FlopsProfilerConfig
from onecopy.observe.flops import FlopProfile
from onecopy.observe.flops_text import StepTimes, profile_text, write_profile
from onecopy.observe.log import note

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

_NOTHING: AbstractContextManager[None] = nullcontext()


class StepFlops:
    """Counts the first training forward of one step on rank 0; other steps, and other ranks, pay a comparison."""

    def __init__(self, settings: FlopsProfilerConfig, rank: int) -> None:
        self.settings = settings
        self._due = settings.enabled and rank == 0
        self._profile: FlopProfile | None = None
        self._moments: list[float] = []  # the ends of forward and backward, the beginning of the step

    def forward(self, engine: Engine) -> AbstractContextManager[None]:
        """Around every forward of the engine."""
        if not self._due or engine.global_steps != self.settings.profile_step or not torch.is_grad_enabled():
            return _NOTHING
        self._due = False
        return self._counting(engine)

    @contextmanager
    def _counting(self, engine: Engine) -> Iterator[None]:
        profile = FlopProfile(engine.module)
        profile.start()
        try:
            yield
        finally:
            profile.stop()
            self._profile, self._moments = profile, [_now()]

    def backward_done(self) -> None:
        """After every backward of the engine."""
        if len(self._moments) == 1:
            self._moments.append(_now())

    def step_begins(self) -> None:
        """Before every update."""
        if self._profile is not None:
            self._moments += [_now()] * (3 - len(self._moments))

    def step_done(self, engine: Engine) -> None:
        """After every boundary: report what was counted."""
        if self._profile is None:
            return
        ended = _now()
        forward, backward, began = self._moments
        times = StepTimes(
            backward=backward - forward,
            step=ended - began,
            samples=engine.train_micro_batch_size_per_gpu() * engine.communicator.world_size,
            ranks=engine.communicator.world_size,
            backward_factor=2 + self.settings.recompute_fwd_factor,
        )
        settings, profile = self.settings, self._profile
        self._profile, self._moments = None, []
        text = profile_text(
            profile, engine.global_steps, settings.module_depth, settings.top_modules, settings.detailed, times
        )
        if settings.output_file:
            write_profile(text, settings.output_file)
            note(f"Flops profile of step {engine.global_steps} written to {settings.output_file}")
        else:
            note("\n" + text)


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
