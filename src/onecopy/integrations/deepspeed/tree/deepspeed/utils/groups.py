"""Groups of ranks: all of them are data-parallel, unless `initialize` was given an mpu."""

from typing import Any

import torch.distributed as dist

from onecopy.integrations.deepspeed.refusal import refused_function

_NO_SEQUENCE = "sequence parallelism is not in onecopy; build the group with torch.distributed and pass mpu="
_get_sequence_parallel_group = refused_function("utils.groups._get_sequence_parallel_group", _NO_SEQUENCE)


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_model_parallel_world_size() -> int:
    return 1


def _get_model_parallel_rank() -> int:
    return 0
