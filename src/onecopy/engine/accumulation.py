"""When does a `step()` end the window? The one place that decides, in plain integers.

managed_gradient_accumulation   a step() is a boundary when
true                            it is the gradient_accumulation_steps-th call (DeepSpeed's counting)
false                           always
unset                           as true, and also when a whole window of forward/backward pairs came before it since
                                the previous step(): the loop `if i % steps == 0: step()` trains as its author meant
"""

from dataclasses import dataclass


@dataclass
class AccumulationWindow:
    """Counts `step()` calls and micro-batches.

    Attributes:
        steps: gradient_accumulation_steps.
        managed: managed_gradient_accumulation, None when unset.
        micro_steps: what DeepSpeed's engine calls so: micro-batches stepped over so far.
        forced: what `set_gradient_accumulation_boundary` said, until it is said otherwise.
    """

    steps: int
    managed: bool | None
    micro_steps: int = 0
    forced: bool | None = None
    _batches_at_last_call: int = 0

    def is_boundary(self, micro_batches: int) -> bool:
        """Whether a `step()` now, `micro_batches` into the window, updates the weights."""
        if self.forced is not None:
            return self.forced
        if self.managed is False:
            return True
        return (self.micro_steps + 1) % self.steps == 0 or self.seen_whole_window(micro_batches)

    def seen_whole_window(self, micro_batches: int) -> bool:
        """The caller steps once a window rather than once a micro-batch."""
        return (
            self.managed is None
            and self.forced is None
            and self.steps > 1
            and micro_batches - self._batches_at_last_call >= self.steps
        )

    def expects_boundary(self, micro_batches: int) -> bool:
        """Whether the backward that makes it `micro_batches` is likely the window's last, so that it may reduce early."""
        if self.forced is not None:
            return self.forced
        return micro_batches >= self.steps

    def step_called(self, boundary: bool, micro_batches: int) -> None:
        """Count one `step()`; after a boundary the next window's calls are counted from its start."""
        if boundary and self.forced is None and self.managed is not False:
            self.micro_steps = (self.micro_steps // self.steps + 1) * self.steps
        else:
            self.micro_steps += 1
        self._batches_at_last_call = 0 if boundary else micro_batches

    def discarded(self) -> None:
        """The gradients of the window so far were thrown away."""
        self._batches_at_last_call = 0
