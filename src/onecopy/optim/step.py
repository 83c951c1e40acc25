"""One optimizer step on sums: norm, clipping, unscaling and skipping without a pass over the gradients.

The gradient shards hold plain sums over ranks and micro-batches, times the loss scale. Everything that divides them
(ranks, micro-batches, loss scale, clipping) is one number, which the fused step applies as it reads (`grad_scale`), and a
non-finite norm makes it do nothing (`found_inf`): the contract torch's GradScaler uses. So nothing waits for the host.
"""

from dataclasses import dataclass

import torch

from onecopy.comm import Communicator
from onecopy.comm.model_parallel import ModelParallel
from onecopy.layout import ALIGNMENT
from onecopy.optim.masters import Masters
from onecopy.optim.registry import supports_fused_scaling
from onecopy.sharding import FlatGradient, Gradients

_TORCH_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class StepOutcome:
    """What a step found; tensors that nobody has waited for.

    Attributes:
        norm: global L2 norm of the mean gradient before clipping, 0-d float32, the same on all ranks.
        found_inf: 1.0 when a gradient was not finite and the step was skipped, else 0.0.
        unused: names of parameters that had no gradient on any rank.
    """

    norm: torch.Tensor
    found_inf: torch.Tensor
    unused: set[str]


class OptimizerStep:
    """Steps the inner optimizer on the gradients of a window.

    With `model_parallel` the norm is that of the whole model: of this rank's shard group and of the groups that hold the
    model's other parts, each parameter once.
    """

    def __init__(
        self,
        masters: Masters,
        gradients: Gradients,
        communicator: Communicator,
        model_parallel: ModelParallel | None = None,
    ) -> None:
        self.masters = masters
        self.gradients = gradients
        self.communicator = communicator
        self.model_parallel = model_parallel
        self._counted: dict[int, torch.Tensor] = {}
        self.optimizer = masters.optimizer
        self.fused = supports_fused_scaling(self.optimizer)
        self.look_at_gradients()

    def look_at_gradients(self) -> None:
        """Read anew which flat buffers are trained; before the first step, and when there are more."""
        self._by_key = sorted(self.gradients.all, key=lambda gradient: gradient.flat.key)
        self._names = [name for gradient in self._by_key for name in gradient.flat.names]
        self._all_used = torch.ones(len(self._names), dtype=torch.float64, device=self.communicator.device)

    def apply(self, divisor: float, clip: float) -> StepOutcome:
        """Step with the sums divided by `divisor` and clipped to norm `clip` (0: not clipped). Collective."""
        norm, unused = self._agree(divisor)
        found_inf = (~torch.isfinite(norm)).to(torch.float32)
        scale = torch.full_like(norm, divisor)
        if clip > 0:
            scale = scale * torch.clamp((norm + _TORCH_CLIP_EPSILON) / clip, min=1.0)
        self.masters.give_gradients(self._by_key, unused)
        self._step(scale.to(torch.float32), found_inf)
        self.masters.drop_gradients()
        return StepOutcome(norm.to(torch.float32), found_inf, unused)

    def _step(self, scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        optimizer = self.optimizer
        if self.fused:
            optimizer.grad_scale, optimizer.found_inf = scale, found_inf  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
        elif not any(
            self.communicator.read(found_inf.view(1)) or ()
        ):  # an optimizer that knows nothing of skipping: the host decides
            given = [run.master.grad for run in self.masters.runs if run.master.grad is not None]
            if given:
                torch._foreach_div_(given, scale)
            optimizer.step()

    def _agree(self, divisor: float) -> tuple[torch.Tensor, set[str]]:
        """The global norm (0-d float64) and the parameters without a gradient anywhere, in one small all-reduce."""
        squares = torch.stack([self._sum_of_squares(gradient) for gradient in self._by_key])
        missing = self.gradients.any_missing()
        used = self._all_used
        if missing:
            flags = [flag for gradient in self._by_key for flag in gradient.used]
            used = torch.tensor(flags, dtype=torch.float64, device=self.communicator.device)
        agreed = self.communicator.sum_vector(torch.cat([squares, used]), "gradient norm")
        total = agreed[: len(squares)].sum()
        if self.model_parallel is not None:
            total = self.model_parallel.sum(total)
        norm = total.sqrt() / divisor
        if not missing:
            return norm, set()
        # Only a rank that lacks a gradient has to know whether others have it: the one case in which the host looks.
        counts = self.communicator.read(agreed[len(squares) :])
        if counts is None:
            counts = [flag for gradient in self._by_key for flag in gradient.used]
        return norm, {name for name, count in zip(self._names, counts, strict=True) if count == 0}

    def _sum_of_squares(self, gradient: FlatGradient) -> torch.Tensor:
        """Of this rank's part, 0-d float64.

        Taken over blocks of 64 elements in fp32, whose sums are added in float64: blocks are the same whatever the
        buckets, stage and world size, so the rounded norm is too.
        """
        assert gradient.shard is not None
        own = gradient.flat.owned(gradient.shard)
        blocks = torch.linalg.vector_norm(
            own.view(-1, ALIGNMENT), dim=1, dtype=own.dtype if own.dtype == torch.float64 else torch.float32
        )
        squares = blocks.to(torch.float64).square_()
        if self.model_parallel is not None:
            squares *= self._counts(gradient, self.model_parallel)
        total: torch.Tensor = squares.sum()
        return total

    def _counts(self, gradient: FlatGradient, model_parallel: ModelParallel) -> torch.Tensor:
        """For each block of 64 elements of this rank's part: 0.0 where another model-parallel rank counts its parameter."""
        key = gradient.flat.key
        if key not in self._counted:
            flat = gradient.flat
            counts = torch.zeros(flat.numel // ALIGNMENT, dtype=torch.float64)
            for parameter, place in zip(flat.parameters, flat.layout.ranges, strict=True):
                if model_parallel.counts(parameter):
                    counts[place.start // ALIGNMENT : place.aligned_stop // ALIGNMENT] = 1.0
            own = counts[flat.own.start // ALIGNMENT : flat.own.stop // ALIGNMENT]
            self._counted[key] = own.to(self.communicator.device)
        return self._counted[key]

    def non_finite_names(self) -> list[str]:
        """Parameters with a non-finite element in this rank's gradient shards. Reads every gradient: for errors only."""
        found = []
        for gradient in self._by_key:
            if gradient.shard is None:
                continue
            own = gradient.flat.owned(gradient.shard)
            base = gradient.flat.own.start
            for parameter, low, high in gradient.flat.layout.in_shard(self.communicator.rank):
                if not torch.isfinite(own[parameter.start + low - base : parameter.start + high - base]).all():
                    found.append(parameter.name)
        return found
