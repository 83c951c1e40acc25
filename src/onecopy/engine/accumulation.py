"""When does a `step()` end the window? The one place that decides, in plain integers.

managed_gradient_accumulation   a step() is a boundary when
true                            it is the gradient_accumulation_steps-th call (DeepSpeed's counting)
false                           always
unset                           as true, and also when a whole window of forward/backward pairs came before it since
                                the previous step(): the loop `if i % steps == 0: step()` trains as its author meant
"""


class AccumulationWindow:
    """Counts `step()` calls and micro-batches.

    Attributes:
        steps: gradient_accumulation_steps; a new value holds for the window under way.
        managed: managed_gradient_accumulation, None when unset.
        forced: what `set_gradient_accumulation_boundary` said, until it is said otherwise.
    """

    def __init__(self, steps: int, managed: bool | None) -> None:
        self.steps = steps
        self.managed = managed
        self.forced: bool | None = None
        self._micro_steps = 0
        self._calls = 0  # of step() in the window under way
        self._batches_at_last_call = 0

    @property
    def micro_steps(self) -> int:
        """What DeepSpeed's engine calls so: micro-batches stepped over so far."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self._micro_steps = value
        self._calls = value % self.steps

    @property
    def micro_steps_at_boundary(self) -> int:
        """What `micro_steps` was at the last boundary."""
        return self._micro_steps - self._calls

    def begin(self, micro_steps: int) -> None:
        """A window begins after so many micro-batches."""
        self._micro_steps, self._calls, self._batches_at_last_call = micro_steps, 0, 0

    def is_boundary(self, micro_batches: int) -> bool:
        """Whether a `step()` now, `micro_batches` into the window, updates the weights."""
        if self.forced is not None:
            return self.forced
        if self.managed is False:
            return True
        return self.counted_out or self.seen_whole_window(micro_batches)

    @property
    def counted_out(self) -> bool:
        """Whether the next `step()` is the window's last by count."""
        return self._calls + 1 >= self.steps

    def seen_whole_window(self, micro_batches: int) -> bool:
        """The caller steps once a window rather than once a micro-batch."""
        return (
            self.managed is None
            and self.forced is None
            and self.steps > 1
            and micro_batches - self._batches_at_last_call >= self.steps
        )

    def advice(self, micro_batches: int) -> tuple[str, str] | None:
        """What to tell a caller whose `step()`, a boundary, does not follow one micro-batch each: a name, and a sentence."""
        if self.seen_whole_window(micro_batches) and not self.counted_out:
            return (
                "natural accumulation",
                f"step() is called once after {self.steps} micro-batches, not after each one; onecopy updates the weights at each "
                'such call. Write "managed_gradient_accumulation": false into the configuration to settle it.',
            )
        if micro_batches > self.steps and self.managed is not False and self.forced is None:
            return (
                "long window",
                f"{micro_batches} forward/backward pairs came before one step(), and gradient_accumulation_steps is {self.steps}; "
                f"the update uses their mean, where plain PyTorch sums: multiply the losses by {micro_batches} for the sum.",
            )
        return None

    def expects_boundary(self, micro_batches: int) -> bool:
        """Whether the backward that makes it `micro_batches` is likely the window's last, so that it may reduce early."""
        if self.forced is not None:
            return self.forced
        return micro_batches >= self.steps

    def step_called(self, boundary: bool, micro_batches: int) -> None:
        """Count one `step()`; one that ends a window early by `seen_whole_window` counts for the whole window."""
        skipped = self.steps - self._calls if boundary and self.forced is None and self.managed is not False else 1
        self._micro_steps += max(1, skipped)
        self._calls = 0 if boundary else self._calls + 1
        self._batches_at_last_call = 0 if boundary else micro_batches

    def discarded(self) -> None:
        """The gradients of the window so far were thrown away."""
        self._batches_at_last_call = 0
