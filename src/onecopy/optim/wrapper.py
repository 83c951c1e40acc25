"""The optimizer a user gets back: a real `torch.optim.Optimizer` whose step is the engine's."""

from collections.abc import Callable
from typing import Any

import torch


class ShardedOptimizer(torch.optim.Optimizer):
    """Shares `param_groups`, `state` and `defaults` with the optimizer it steps.

    Learning-rate schedulers, edits of `param_groups` and code that calls `step()` and `zero_grad()` itself work on it.
    `param_groups[i]["params"]` are this rank's flat fp32 masters.

    Attributes:
        optimizer: the inner optimizer.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        step: Callable[[], None],
        zero_grad: Callable[[], None],
        applied: Callable[[], bool] = lambda: True,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        # Not super().__init__: it would make groups of its own, and both optimizers must see the same ones.
        self.optimizer = inner
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self.state = inner.state
        self._step = step
        self._zero_grad = zero_grad
        self._applied = applied
        self._scale = scale
        for name, value in vars(inner).items():
            if name.startswith("_optimizer_") or name in (
                "_warned_capturable_if_run_uncaptured",
                "_zero_grad_profile_name",
            ):
                setattr(self, name, value)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip, update and clear the gradients of the window. Collective.

        With a closure, it is called first (with gradients enabled) and its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite. Waits for the device."""
        return not self._applied()

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale now; 1.0 without one."""
        return self._scale()

    cur_scale = loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window so far, as in torch."""
        self._zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """This rank's groups and flat states; `engine.save_checkpoint` writes them by parameter name instead."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave at the same world size, stage and bucket sizes.

        Group dictionaries are changed in place, so that schedulers keep seeing them.
        """
        groups, state = self.param_groups, self.state
        self.optimizer.load_state_dict(state_dict)
        for kept, loaded in zip(groups, self.optimizer.param_groups, strict=True):
            kept.update(loaded)
        loaded_state = dict(self.optimizer.state)
        state.clear()
        state.update(loaded_state)
        self.optimizer.param_groups = groups
        self.optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError(
            "add_param_group after onecopy.initialize is not possible: give all parameters to initialize and freeze the ones that wait"
        )

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"
