"""Torch's collectives with DeepSpeed's names of arguments; those for its communication log are taken and change nothing."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as _dist


def _renamed(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """Torch's function, whose arguments may have DeepSpeed's names (keys of `names`)."""

    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **kwargs: Any) -> Any:
        return function(*args, **{names.get(name, name): value for name, value in kwargs.items()})

    return call


all_gather = _renamed(_dist.all_gather)
all_gather_into_tensor = _renamed(_dist.all_gather_into_tensor, tensor="input_tensor")
all_gather_object = _renamed(_dist.all_gather_object)
all_reduce = _renamed(_dist.all_reduce)
all_to_all = _renamed(_dist.all_to_all)
all_to_all_single = _renamed(_dist.all_to_all_single, tensor="input")
barrier = _renamed(_dist.barrier)
batch_isend_irecv = _renamed(_dist.batch_isend_irecv)
broadcast = _renamed(_dist.broadcast)
broadcast_object_list = _renamed(_dist.broadcast_object_list)
gather = _renamed(_dist.gather)
inference_all_reduce = all_reduce
irecv = _renamed(_dist.irecv)
isend = _renamed(_dist.isend)
monitored_barrier = _renamed(_dist.monitored_barrier)
recv = _renamed(_dist.recv)
reduce = _renamed(_dist.reduce)
reduce_scatter = _renamed(_dist.reduce_scatter)
reduce_scatter_tensor = _renamed(_dist.reduce_scatter_tensor, output_tensor="output", tensor="input")
scatter = _renamed(_dist.scatter)
send = _renamed(_dist.send)
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor


def all_gather_coalesced(
    output_tensors: list[Any], input_tensors: list[Any], group: Any = None, async_op: bool = False
) -> Any:
    """One `all_gather_into_tensor` a pair. With `async_op` the list of their handles."""
    works = [
        _dist.all_gather_into_tensor(output, tensor, group=group, async_op=async_op)
        for output, tensor in zip(output_tensors, input_tensors, strict=True)
    ]
    return works if async_op else None


def all_reduce_coalesced(
    tensors: list[Any],
    op: Any = _dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "",
    debug: str = "",
) -> Any:
    """One `all_reduce` a tensor. With `async_op` the list of their handles."""
    works = [_dist.all_reduce(tensor, op=op, group=group, async_op=async_op) for tensor in tensors]
    return works if async_op else None
