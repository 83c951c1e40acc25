"""What the engine answers about a run under way: counters, rates, sizes, bytes."""

from typing import Any

import torch

from onecopy.comm import Communicator
from onecopy.engine.accumulation import AccumulationWindow
from onecopy.engine.getters import ConfigGetters
from onecopy.engine.outcomes import Outcomes
from onecopy.engine.reporting import Reporter
from onecopy.optim.wrapper import ShardedOptimizer


class Answers(ConfigGetters, Outcomes):
    """Mixed into the engine, which sets the attributes named here."""

    communicator: Communicator
    window: AccumulationWindow
    reporter: Reporter
    optimizer: ShardedOptimizer | None
    basic_optimizer: torch.optim.Optimizer | None
    device: torch.device

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []

    def get_mom(self) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[str]:
        return [type(self.basic_optimizer).__name__] if self.basic_optimizer else []

    @property
    def micro_steps(self) -> int:
        return self.window.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.window.micro_steps = value

    def gradient_accumulation_steps(self) -> int:
        return self.window.steps

    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.window.steps * self.communicator.world_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change `gradient_accumulation_steps` so that one step takes so many samples; from the next window on."""
        a_step = self.train_micro_batch_size_per_gpu() * self.communicator.world_size
        if train_batch_size <= 0 or train_batch_size % a_step:
            raise ValueError(
                f"train_batch_size {train_batch_size} is no multiple of {a_step} (micro-batch {self.train_micro_batch_size_per_gpu()} "
                f"x {self.communicator.world_size} ranks)"
            )
        self.window.steps = train_batch_size // a_step

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, micro-batch size a rank, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.window.steps

    @property
    def global_rank(self) -> int:
        return torch.distributed.get_rank()

    @property
    def local_rank(self) -> int:
        return self.device.index or 0

    @property
    def world_size(self) -> int:
        return torch.distributed.get_world_size()

    @property
    def dp_world_size(self) -> int:
        return self.communicator.world_size

    @property
    def monitor(self) -> Any:
        return self.reporter.monitor

    def memory(self) -> dict[str, int]:
        """Bytes of training state on this rank now, by category. Not collective."""
        return self.reporter.memory(self)  # type: ignore[arg-type]

    def communication(self) -> dict[str, Any]:
        """Bytes this rank sent and collectives it took part in during the last step, in all and by kind."""
        last = self.communicator.counters.last_step
        return {
            "bytes_sent": sum(last["bytes_sent"].values()),
            "collectives": sum(last["collectives"].values()),
            "bytes_by_kind": dict(last["bytes_sent"]),
            "collectives_by_kind": dict(last["collectives"]),
        }
