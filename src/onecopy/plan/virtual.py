"""A virtual world: N ranks of which one is here, and tensors that have shapes but no memory.

Torch's fake process group answers every collective at once, and FakeTensorMode computes shapes instead of values. The
engine runs in it as it is: the same hooks, slots, order and step, so what it would allocate and send is seen exactly.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from onecopy.activations.storage import PLAIN
from onecopy.comm import connect
from onecopy.comm.communicator import Communicator
from onecopy.errors import PlanError
from onecopy.observe.log import each_text_once
from onecopy.plan.as_accelerator import as_on_accelerator
from onecopy.plan.tape import RecordingCollective
from onecopy.sharding.parameter import GUARDED, UNGUARDED, call_guarded

LARGEST_WORLD = 16_384
CPU = torch.device("cpu")

_worlds: list[bool] = []  # the virtual worlds this process is in: whether each is one of accelerators


class GuardedFakeParameter(FakeTensor):
    """A fake parameter whose weights are elsewhere; see `onecopy.sharding.parameter`."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_guarded(cls, func, args, kwargs)


@contextmanager
def virtual_world(world_size: int, accelerator: bool = True, rank: int = 0) -> Iterator[FakeTensorMode]:
    """Be rank `rank` of `world_size` imagined ranks; tensors made inside are fake.

    Args:
        accelerator: choose the back end and buffers that GPUs would use; else those of a real world on CPUs.

    Raises:
        PlanError: the world size is out of range, or this process is already part of a real world.
    """
    if not 1 <= world_size <= LARGEST_WORLD:
        raise PlanError(f"a plan for {world_size} ranks is not possible; give 1 to {LARGEST_WORLD}")
    if dist.is_initialized():
        raise PlanError(
            "this process already belongs to a torch.distributed world; plan before init_process_group, or in a "
            "process of its own (`onecopy plan`)"
        )
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        hidden = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]
        stack.enter_context(mock.patch.dict(os.environ))
        for name in hidden:
            del os.environ[name]
        stack.enter_context(_fake_tensors_are_plain())
        stack.enter_context(each_text_once())  # of an engine that an answer builds dozens of times
        stack.enter_context(_without_advice_of_transformers())
        if "transformers.masking_utils" in sys.modules:
            # Its answer depends on values: a batch of whole sequences, as in training on packed text of one length, needs no mask.
            stack.enter_context(
                mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_, **__: None)
            )
        stack.enter_context(
            mock.patch.dict(op_implementations_dict, {torch.ops.aten._grouped_mm.default: _grouped_product})
        )
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(_leave)
        _worlds.append(accelerator)
        stack.callback(_worlds.pop)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if accelerator:
            stack.enter_context(as_on_accelerator())
        yield mode


def communicator_here() -> Communicator | None:
    """A communicator over the ranks of the virtual world this process is in; None outside one, where `initialize` makes its own.

    Fake tensors say they are on the CPU whatever the machine: autograd on fake CUDA tensors needs a CUDA build, and sizes
    and order are the same on any device.
    """
    if not _worlds:
        return None
    if not _worlds[-1]:
        return connect(None, CPU)
    ranks = list(range(dist.get_world_size()))
    communicator = RecordingCollective(dist.new_group(ranks), dist.new_group(ranks), CPU)
    communicator._sums_on_the_wire = True  # as NCCL does
    return communicator


@contextmanager
def _without_advice_of_transformers() -> Iterator[None]:
    """Which kernels to install for speed, which loss a class has: about a run here, not about the one that is planned."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _fake_tensors_are_plain() -> Iterator[None]:
    """A tensor or parameter made under FakeTensorMode is a FakeTensor by class: let the engine store and shard it like any other."""
    GUARDED[FakeTensor] = GuardedFakeParameter
    UNGUARDED[GuardedFakeParameter] = FakeTensor
    PLAIN.add(FakeTensor)
    try:
        yield
    finally:
        del GUARDED[FakeTensor], UNGUARDED[GuardedFakeParameter]
        PLAIN.discard(FakeTensor)


def _grouped_product(
    mode: FakeTensorMode,
    func: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Any:
    """The result of experts' products: torch's own shapes know bf16 only, its kernels take fp16 and fp32 too."""
    if a.dtype == torch.bfloat16:
        return NotImplemented  # torch's own
    if a.dim() == b.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == b.dim() == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[-2], b.shape[-1])
    return a.new_empty(shape)
