"""The other axis: ranks that hold different parts of one layer, as the `mpu` given to `initialize` describes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_FLAGS = ("model_parallel", "tensor_model_parallel")  # Megatron's and DeepSpeed's marks on a parameter that is split


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """The ranks that compute one model together; each of them shards its part over its own data-parallel group.

    Attributes:
        group: the process group of the caller's `mpu`; onecopy never destroys it.
        rank, world_size: this rank's place in it.
    """

    group: dist.ProcessGroup
    rank: int
    world_size: int

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's `part` [k] in rank order, [world_size, k]. Collective over the group."""
        everyone = torch.empty(self.world_size * part.numel(), dtype=part.dtype, device=part.device)
        if part.device.type == "cpu":  # gloo fills a list of tensors in every version of torch
            dist.all_gather(list(everyone.chunk(self.world_size)), part.contiguous(), group=self.group)
        else:
            dist.all_gather_into_tensor(everyone, part.contiguous(), group=self.group)
        return everyone.view(self.world_size, part.numel())

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over the group, the same bits on every rank. Collective over the group."""
        return self.gather(value.flatten()).sum(dim=0).view(value.shape)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's small Python value, in rank order. Collective over the group; it synchronises the host."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank's copy of `parameter` counts in sums over the model: a split one always, a copy on rank 0."""
        return self.rank == 0 or any(getattr(parameter, flag, False) for flag in _FLAGS)


def model_parallel_of(mpu: Any) -> ModelParallel | None:
    """The model-parallel group of `mpu`, None where it has none or only one rank."""
    for name in ("get_model_parallel_group", "get_tensor_model_parallel_group"):
        get: Callable[[], dist.ProcessGroup | None] | None = getattr(mpu, name, None)
        group = get() if get is not None else None
        if group is not None and dist.get_world_size(group) > 1:
            return ModelParallel(group, dist.get_rank(group), dist.get_world_size(group))
    return None
