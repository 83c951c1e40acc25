"""`deepspeed.comm`: torch.distributed under DeepSpeed's names."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as _dist
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    destroy_process_group,
    get_rank,
    get_world_size,
    is_available,
    is_initialized,
    new_group,
)
from torch.distributed import get_global_rank as _global_rank
from torch.distributed.device_mesh import init_device_mesh

from onecopy.comm import ensure_process_group
from onecopy.comm.connect import default_device
from onecopy.observe import log_once

from .calls import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    allgather_fn,
    barrier,
    batch_isend_irecv,
    broadcast,
    broadcast_object_list,
    gather,
    inference_all_reduce,
    irecv,
    isend,
    monitored_barrier,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_fn,
    reduce_scatter_tensor,
    scatter,
    send,
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
        mpi_discovery(distributed_port)
    ensure_process_group(dist_backend, None if timeout is None else timeout.total_seconds(), distributed_port)


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
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


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    return False


def set_backend() -> None:
    """Nothing to do: torch.distributed is the only backend."""


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Any = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Accepted; nothing is logged, because the engine counts by itself: `engine.communication()`."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Nothing is logged; says once where the counts are. With `return_dict` an empty dictionary."""
    log_once(
        "comm.log_summary",
        "comm.log_summary: onecopy keeps no log of calls; engine.communication() counts the last step's",
    )
    return {} if return_dict else None


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Torch's device mesh over all ranks. Collective."""
    return init_device_mesh(default_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "set_backend",
]
