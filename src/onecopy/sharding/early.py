"""A parameter sharded on its own, before `initialize` cuts units: every rank keeps a flat N-th of it.

                    gather (collective)
    shard [n/N]  ------------------------>  the parameter, whole ("live")
    (placeholder) <------------------------
                    settle: one rank's values, sent to all, and cut again

The functions of this file say where weights are; who may touch a parameter, and when, is `early_parameter.py`'s business.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import Communicator
from onecopy.comm.collective import Collective
from onecopy.sharding import host_memory
from onecopy.sharding.parameter import ZeroParamStatus

ATTRIBUTE = "_onecopy_early"  # where a parameter keeps its `EarlyShard`
_CONTRACT = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_tensor",
    "ds_status",
    "ds_persist",
    "ds_process_group",
    "ds_param_type",
)
METHODS = ("all_gather", "partition", "partition_numel", "ds_summary")  # of DeepSpeed's sharded parameters
_numbers = itertools.count()
_communicators: dict[int, Collective] = {}


def borrowed_communicator(group: dist.ProcessGroup | None, device: torch.device) -> Communicator:
    """A communicator on the caller's own process group (default: all ranks), which is never closed. Not collective."""
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    found = _communicators.get(id(parent))
    if found is None or found.group is not parent or found.device != device:
        found = _communicators[id(parent)] = Collective(parent, parent, device)
    return found


class EarlyShard:
    """This rank's part of one parameter, and what the whole looks like.

    Attributes:
        number: counts sharded parameters of this process: the order in which several are gathered.
        shape, dtype: of the whole parameter.
        shard: [ceil(n/N)], the end padded with zeros.
        home: the device the shard is kept on.
        origin: the device the parameter is on for the model's code, whole or not.
        live: whether the parameter is whole now.
        borrowed: how many gathering contexts hold it whole.
        seen: what a changed parameter would differ in: (data pointer, version) when it became whole.
        suspect: somebody may write to the whole weights unseen, through `.data`.
    """

    def __init__(
        self, parameter: nn.Parameter, label: str, communicator: Communicator, home: torch.device, kind: type
    ) -> None:
        self.number = next(_numbers)
        self.label = label
        self.communicator = communicator
        self.home = home
        self.origin = parameter.device
        self.kind = kind  # the class a parameter has while it is not live
        self.live = False
        self.borrowed = 0
        self.seen = (0, 0)
        self.suspect = False
        self.handles: list[Any] = []
        self.reserve(tuple(parameter.shape), parameter.dtype)
        self._parameter = weakref.ref(parameter)
        setattr(parameter, ATTRIBUTE, self)

    def __repr__(self) -> str:
        return f"EarlyShard({self.label}: {list(self.shape)} of {self.dtype}, 1/{self.communicator.world_size} here)"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Elements of every rank's part, padding included."""
        return -(-self.numel // self.communicator.world_size)

    def own(self) -> tuple[int, int]:
        """The half-open range of the flattened parameter that this rank holds (padding left out)."""
        start = self.communicator.rank * self.size
        return min(start, self.numel), min(start + self.size, self.numel)

    # -------------------------------------------------------------------------------------------------- cut and gather
    @torch.no_grad()
    def cut(self, value: torch.Tensor) -> None:
        """Keep this rank's part of the whole `value`, which fixes shape and dtype. Not collective."""
        if (tuple(value.shape), value.dtype) != (self.shape, self.dtype):
            self.reserve(tuple(value.shape), value.dtype)
        start, stop = self.own()
        self.shard[: stop - start].copy_(value.reshape(-1)[start:stop])

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make room for a parameter whose values come later, by `shard`; zeros only at its end. Not collective."""
        self.shape, self.dtype = shape, dtype
        self.shard = torch.empty(self.size, dtype=dtype, device=self.home)
        start, stop = self.own()
        self.shard[stop - start :].zero_()

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        """The parameter whole, in memory of its own on the communicator's device. Collective."""
        communicator = self.communicator
        if communicator.world_size == 1:
            return self.shard.to(communicator.device, copy=True).view(self.shape)
        flat = torch.empty(self.size * communicator.world_size, dtype=self.dtype, device=communicator.device)
        parts = flat.split(self.size)
        parts[communicator.rank].copy_(self.shard)
        if communicator.device.type == "cpu":  # gloo's all-gather needs a second buffer of this size
            for source, part in enumerate(parts):
                communicator.broadcast(part, source, self.label)
        else:
            communicator.gather(flat, self.number + 1, self.label)
        return flat[: self.numel].view(self.shape)

    @torch.no_grad()
    def send(self, parameter: nn.Parameter, source: int) -> None:
        """Let the whole values of group rank `source` be everyone's, and cut them. Collective."""
        self.origin = parameter.device
        value = parameter.data.to(self.communicator.device).contiguous()
        self.communicator.broadcast(value, source, self.label)
        self.cut(value)

    # ------------------------------------------------------------------------------------------------ the parameter itself
    def bind(self, parameter: nn.Parameter) -> None:
        """Make the parameter whole. Collective."""
        value = self.whole().to(self.origin)
        parameter.__class__ = nn.Parameter
        parameter.data = value
        self.live, self.suspect = True, False
        self.seen = (parameter.data_ptr(), parameter._version)
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]

    def unbind(self, parameter: nn.Parameter) -> None:
        """Leave a placeholder without elements in the parameter. Not collective."""
        parameter.__class__ = nn.Parameter
        nbytes = parameter.nbytes if parameter.device.type == "cpu" else 0
        parameter.data = torch.empty(0, dtype=self.dtype, device=self.origin)
        host_memory.freed(nbytes)
        parameter.__class__ = self.kind
        self.live = False
        self.mark(parameter)

    def changed(self, parameter: nn.Parameter) -> bool:
        """Whether the whole values may differ from the shards."""
        return self.suspect or self.seen != (parameter.data_ptr(), parameter._version)

    def mark(self, parameter: nn.Parameter) -> None:
        """Set the attributes that DeepSpeed's sharded parameters have."""
        values = {
            "ds_id": self.number,
            "ds_shape": torch.Size(self.shape),
            "ds_numel": self.numel,
            "ds_tensor": self.shard,
            "ds_status": ZeroParamStatus.NOT_AVAILABLE,
            "ds_persist": False,
            "ds_process_group": self.communicator.group,
            "all_gather": self._all_gather,
            "partition": self._partition,
            "partition_numel": self._partition_numel,
            "ds_summary": self._summary,
        }
        for name, value in values.items():
            setattr(parameter, name, value)

    def unmark(self, parameter: nn.Parameter) -> None:
        """Take those attributes off, and the shard itself."""
        for name in (*_CONTRACT, *METHODS, ATTRIBUTE):
            parameter.__dict__.pop(name, None)

    def leave(self) -> None:
        """The weights are somebody else's now: free the shard and take off what was hung on for it."""
        self.shard = self.shard.new_empty(0)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _all_gather(self, *_: Any, **__: Any) -> None:
        """DeepSpeed's method: whole until `partition`."""
        parameter = self._parameter()
        if parameter is not None and not self.live:
            self.bind(parameter)
            self.borrowed += 1

    def _partition(self, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False) -> None:
        """DeepSpeed's method: put it away, keeping this rank's part of its values if they changed."""
        parameter = self._parameter()
        if parameter is not None and self.live:
            if has_been_updated:
                self.cut(parameter.data)
            self.borrowed = 0
            self.unbind(parameter)

    def _partition_numel(self) -> int:
        return self.size

    def _summary(self, *_: Any, **__: Any) -> dict[str, Any]:
        parameter = self._parameter()
        return {
            "id": self.number,
            "status": None if parameter is None else getattr(parameter, "ds_status", None),
            "numel": 0 if parameter is None else torch.Tensor.numel(parameter),
            "ds_numel": self.numel,
            "shape": tuple(parameter.shape) if parameter is not None else None,
            "ds_shape": self.shape,
            "requires_grad": parameter is not None and parameter.requires_grad,
        }


def early_shard(parameter: Any) -> EarlyShard | None:
    """The shard of a parameter that was sharded at construction and that no engine has taken yet."""
    found: EarlyShard | None = getattr(parameter, ATTRIBUTE, None)
    return found


def nobody_else_holds(parameter: nn.Parameter) -> bool:
    """Whether the parameter's memory is its own: no view, detached tensor or saved tensor aliases it."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True
    storage = parameter.untyped_storage()
    return count(storage._cdata) <= 2  # the parameter and `storage`
