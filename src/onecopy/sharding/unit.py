"""A unit: parameters gathered, used, reduced and released together, usually one block of the model."""

from collections.abc import Sequence

import torch
from torch import nn

from onecopy.sharding.flat_buffer import FlatBuffer
from onecopy.sharding.parameter import GuardedParameter, ZeroParamStatus
from onecopy.sharding.slots import Slot, region_bytes


class Unit:
    """One unit on this rank.

    Attributes:
        name: the module's qualified name, or "(root)" / "(small parameters)".
        module: the module whose forward uses it; None for parameters that any module may use.
        buffers: its flat buffers; `sharded` are those that borrow a slot, `whole` those that are always here.
        home: the slot it borrows unless that is in use.
        slot: where its weights are now, if they are here.
        needs_weights_in_backward: False for embeddings alone, whose gradient does not read the weight.
        outstanding: sequence numbers of forwards whose backward has not begun.
    """

    def __init__(self, name: str, module: nn.Module | None, buffers: Sequence[FlatBuffer], resident: bool) -> None:
        self.name = name
        self.module = module
        self.buffers = list(buffers)
        self.sharded = [flat for flat in buffers if flat.place.sharded]
        self.whole = [flat for flat in buffers if not flat.place.sharded]
        self.resident = resident
        self.slot_bytes = sum(region_bytes(flat) for flat in self.sharded)
        self.numel = sum(flat.numel for flat in self.sharded)
        self.home: Slot | None = None
        self.slot: Slot | None = None
        self.pinned = 0
        self.needs_weights_in_backward = not (isinstance(module, nn.Embedding) and module.max_norm is None)
        self.outstanding: list[int] = []
        self._offsets: list[int] = []
        offset = 0
        for flat in self.sharded:
            self._offsets.append(offset)
            offset += region_bytes(flat)
        self._placeholders = {
            flat.dtype: torch.empty(0, dtype=flat.dtype, device=flat.communicator.device) for flat in self.sharded
        }

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.numel} sharded elements, {len(self.buffers)} flat buffers)"

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for flat in self.buffers for parameter in flat.parameters]

    # ------------------------------------------------------------------------------------------------ gather, release
    def gather_into(self, slot: Slot) -> None:
        """Start to gather into `slot`, whose owner must have left it. Collective."""
        slot.drain()
        slot.owner = self
        slot.ready = False
        self.slot = slot
        for flat, offset in zip(self.sharded, self._offsets, strict=True):
            region = slot.region(flat, offset)
            flat.fill_own(region.wire.own)
            slot.gathers.append(flat.communicator.start_gather(region.wire, flat.key, flat.label))
        self._set_status(ZeroParamStatus.INFLIGHT)

    def bind(self) -> None:
        """Wait for the gather and let the parameters be views of the slot. Not collective."""
        assert self.slot is not None
        self.slot.wait()
        for flat, offset in zip(self.sharded, self._offsets, strict=True):
            flat.bind(self.slot.region(flat, offset).views)
        self._set_status(ZeroParamStatus.AVAILABLE)

    def guard(self) -> None:
        """Let reads of the parameters be seen, although their weights are still here."""
        for flat in self.sharded:
            flat.guard()

    def bind_shapes(self) -> None:
        """Give the parameters their shapes without their weights, for gradients that do not read them.

        The values are NaN: a read that was not foreseen poisons the step instead of passing unseen.
        """
        for flat in self.sharded:
            nan = torch.full((), float("nan"), dtype=flat.dtype, device=flat.communicator.device)
            flat.bind([nan.expand(r.shape) for r in flat.layout.ranges])

    def release(self) -> None:
        """Give the slot up: the parameters become empty and guarded. Not collective."""
        if self.slot is not None:
            self.slot.owner = None
            self.slot = None
        for flat in self.sharded:
            flat.unbind(self._placeholders[flat.dtype])
        self._set_status(ZeroParamStatus.NOT_AVAILABLE)

    def outdate(self) -> None:
        """The weights have changed where they are kept: unless in use, give the slot up, so that they are gathered anew.

        Parameters that somebody holds whole stay so. Not collective; every rank does it.
        """
        if self.slot is None or self.slot.pins:
            return
        self.slot.drain()
        self.slot.owner = None
        self.slot = None
        for flat in self.sharded:
            for index, parameter in enumerate(flat.parameters):
                if isinstance(parameter, GuardedParameter):
                    flat.unbind_one(index)
        self._set_status(ZeroParamStatus.NOT_AVAILABLE)

    def whole_of(self, flat: FlatBuffer) -> torch.Tensor:
        """The gathered flat buffer [n] in the slot (or the permanent one), as it lies."""
        if flat.whole is not None:
            return flat.whole
        assert self.slot is not None
        return self.slot.region(flat, self._offsets[self.sharded.index(flat)]).wire.buffer

    def finish_refresh(self) -> None:
        for flat in self.whole:
            flat.finish_refresh()

    @property
    def lent(self) -> bool:
        """Whether a gathering context holds all its sharded parameters whole."""
        return bool(self.sharded) and all(len(flat.lent) == len(flat.parameters) for flat in self.sharded)

    def _set_status(self, status: ZeroParamStatus) -> None:
        for flat in self.sharded:
            for index, parameter in enumerate(flat.parameters):
                if index not in flat.lent:
                    parameter.ds_status = status  # type: ignore[attr-defined]
