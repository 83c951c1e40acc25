"""`deepspeed.comm`: torch.distributed under DeepSpeed's names."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _dist
from torch.distributed import (
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from torch.distributed import get_global_rank as _global_rank

from onecopy.comm import ensure_process_group
from onecopy.comm.connect import default_device
from onecopy.integrations.deepspeed.refusal import refused_function

inference_all_reduce = all_reduce
log_summary = refused_function(
    "comm.log_summary", "engine.communication() counts the bytes and collectives of the last step"
)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed from the launcher's environment, or adopt it if it is up. Collective.

    Args:
        dist_backend: default: what the device needs, gloo on the CPU.
        auto_mpi_discovery: without RANK in the environment, take rank and world size from Open MPI's or Slurm's variables.
        timeout: default: DEEPSPEED_TIMEOUT minutes of the environment, else torch's own.
        init_method, rank, world_size: for a start without environment variables, as in torch.
    """
    if is_initialized() or dist_init_required is False:
        return
    if timeout is None and "DEEPSPEED_TIMEOUT" in os.environ:
        timeout = timedelta(minutes=float(os.environ["DEEPSPEED_TIMEOUT"]))
    if init_method is not None or rank >= 0 or world_size >= 0:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        backend = dist_backend or ("gloo" if default_device().type == "cpu" else None)
        address = init_method or "env://"
        _dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, **options)
        return
    if auto_mpi_discovery and "RANK" not in os.environ:
        _take_mpi_ranks()
    ensure_process_group(dist_backend, None if timeout is None else timeout.total_seconds(), distributed_port)


def _take_mpi_ranks() -> None:
    """Copy what mpirun or srun set into the variables that torch reads."""
    for names in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if all(name in os.environ for name in names):
            for target, name in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), names):
                os.environ[target] = os.environ[name]
            return


def get_local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The rank in the whole world of rank `group_rank` of `group`."""
    return group_rank if group is None or group is _dist.group.WORLD else int(_global_rank(group, group_rank))


def get_world_group() -> Any:
    """The group of all ranks."""
    return _dist.group.WORLD


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The ranks of `group` in the whole world."""
    return list(_dist.get_process_group_ranks(group))


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """`all_gather_into_tensor` under its older name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """`reduce_scatter_tensor` under its older name."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


__all__ = [
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]
