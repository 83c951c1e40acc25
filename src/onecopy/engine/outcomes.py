"""What finished steps found: their norm, whether they were skipped, and what the loss scale learns from it.

A step's outcome is a tensor on the device. It is read when somebody asks, so that on an accelerator the host need not wait.
"""

from typing import Any

import torch

from onecopy.comm import Communicator
from onecopy.config import Config
from onecopy.engine.reporting import Reporter
from onecopy.optim.loss_scale import LossScaler
from onecopy.optim.step import OptimizerStep, StepOutcome


class Outcomes:
    """Mixed into the engine, which sets the attributes named here."""

    communicator: Communicator
    configuration: Config
    reporter: Reporter
    scaler: LossScaler | None
    lr_scheduler: Any
    device: torch.device
    global_steps: int
    optimizer_step: OptimizerStep
    _outcome: StepOutcome | None
    _unread: list[StepOutcome]
    _skipped: int
    _step_applied: bool
    _between_boundaries = False  # the last step() only counted

    @property
    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite. Waits for the device."""
        self._read_outcomes()
        return self._skipped

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._skipped = value

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: not off a boundary, nor when skipped. Waits for the device."""
        self._read_outcomes()
        return self._step_applied and not self._between_boundaries

    def _last_update_applied(self) -> bool:
        """Whether the last boundary changed the weights, or there was none yet. Waits for the device."""
        self._read_outcomes()
        return self._step_applied or self._outcome is None

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's mean gradient before clipping, the same on all ranks; None before the first step."""
        if self._outcome is None:
            return None
        read = self.communicator.read(self._outcome.norm.view(1))
        return None if read is None else (read[0] if read[0] == read[0] else float("inf"))

    @property
    def _reads_at_once(self) -> bool:
        """Whether the host waits for a step's outcome: only where that is free, or where a schedule depends on it."""
        return self.device.type == "cpu" or self.scaler is not None or self.lr_scheduler is not None

    def _read_outcomes(self) -> None:
        """Take in what finished steps found: counters, loss scale, a word about skipped steps."""
        unread, self._unread = self._unread, []
        for outcome in unread:
            found = self.communicator.read(outcome.found_inf.view(1))
            overflow = bool(found and found[0])
            self._step_applied = not overflow
            if overflow:
                self._skipped += 1
                detail = ""
                if self.scaler is not None and self.scaler.scale <= self.configuration.fp16.min_loss_scale:
                    detail = self._where_not_finite()
                self.reporter.skipped(self.global_steps + 1, self.scaler)
            if self.scaler is not None:
                self.scaler.update(overflow, detail if overflow else "")

    def _where_not_finite(self) -> str:
        names = self.optimizer_step.non_finite_names()
        return f"gradients that are not finite on rank {self.communicator.rank}: {', '.join(names[:5]) or 'none here'}"
