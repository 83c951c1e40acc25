"""Loaders."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from onecopy.engine.dataloader import ShardedDataLoader
from onecopy.utils import RepeatingLoader


class _AnyLoader(type):
    """The loaders that the engine makes are instances too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedDataLoader)


class DeepSpeedDataLoader(ShardedDataLoader, metaclass=_AnyLoader):
    """onecopy's loader with DeepSpeed's arguments; ranks and their number are those of the world if they are not given."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Any = None,
    ) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(
            dataset,
            batch_size,
            rank if data_parallel_rank is None else data_parallel_rank,
            ranks if data_parallel_world_size is None else data_parallel_world_size,
            collate_fn,
            dataloader_drop_last,
            num_local_io_workers or 0,
            data_sampler,
        )


__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
