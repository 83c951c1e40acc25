"""One flat buffer: parameters of one dtype laid end to end, and where its weights are kept on this rank.

whole place    `whole` [n]      permanent, in the compute dtype; parameters are views of it
sharded place  `shard` [n/N]    (or the fp32 master, which then is the only copy); a slot is borrowed while in use
"""

from collections.abc import Sequence

import torch
from torch import nn

from onecopy.comm import Communicator, PendingGather
from onecopy.comm.wire import Wire
from onecopy.errors import ModelError
from onecopy.layout import FlatLayout, Place, Placement
from onecopy.sharding.parameter import ZeroParamStatus, guard, unguard
from onecopy.sharding.pending import is_unloaded, stop_waiting, take_weights, unknown

HIGH_PRECISION = (torch.float32, torch.float64)


class FlatBuffer:
    """Parameters that are gathered, reduced and stepped in one piece.

    Attributes:
        key: its number, the same on all ranks and unique in the process's engines; 0 is reserved for agreements.
        parameters, names: in the order of `layout.ranges`.
        dtype: the compute dtype, in which weights are gathered and used.
        place: whether the compute weights are whole or sharded.
        trainable: whether it has masters and receives gradients.
        group_spans: (optimizer group, start, stop) in elements of the flat buffer, in order; none while it is frozen.
        master: fp32 (or fp64) weights the optimizer updates: [n/N], or [n] where the optimizer's place is whole.
    """

    def __init__(
        self,
        key: int,
        label: str,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        dtype: torch.dtype,
        place: Place,
        group_of: Sequence[int] | None,
        communicator: Communicator,
        placement: Placement,
        frozen: bool = False,
    ) -> None:
        self.key = key
        self.label = label
        self.parameters = list(parameters)
        self.names = list(names)
        self.dtype = dtype
        self.place = place
        self.trainable = group_of is not None and not frozen
        self.communicator = communicator
        self.layout = FlatLayout.pack(names, [tuple(p.shape) for p in parameters], communicator.world_size)
        self._later_spans = _spans(self.layout, group_of) if group_of is not None else []
        self.group_spans = self._later_spans if self.trainable else []
        self.own = slice(*self.layout.shard_bounds(communicator.rank))
        self.whole: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.master: torch.Tensor | None = None
        self.optimizer_whole = not placement.optimizer.sharded
        self._refresh: PendingGather | None = None
        self._wire: Wire | None = None  # of `whole`, once it has been refreshed
        self._whole_views: list[torch.Tensor] = []
        self.lent: set[int] = set()  # sharded parameters that a gathering context holds whole, by place
        self._seen: list[tuple[int, int]] = []  # address and version of each whole parameter, when last looked at
        self._take_weights()

    def __repr__(self) -> str:
        names = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        return f"FlatBuffer({self.label}: {names}; {self.layout.numel} elements of {self.dtype}, {self.place.value})"

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer in the compute dtype."""
        return self.layout.numel * self.dtype.itemsize

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's view of a whole buffer [n]."""
        return [flat[r.start : r.stop].view(r.shape) for r in self.layout.ranges]

    def owned(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part [n/N] of a whole buffer [n]; the master of an optimizer kept whole is one too."""
        return flat[self.own] if flat.numel() == self.layout.numel else flat

    # ------------------------------------------------------------------------------------- taking the model's weights
    def _take_weights(self) -> None:
        """Copy the parameters as given into masters and compute weights, and let go of the originals."""
        device = self.communicator.device
        given = self.parameters[0].dtype
        exact = given if not given.is_floating_point or given in HIGH_PRECISION else torch.float32
        if self.place.sharded and all(is_unloaded(parameter) for parameter in self.parameters):
            own = self._await_weights(exact if self.trainable else given)
        else:
            flat = self._new_whole(exact if self.trainable else given).zero_()
            for parameter, view in zip(self.parameters, self.views(flat), strict=True):
                view.copy_(take_weights(parameter))
                parameter.data = view  # frees the original now, not after the whole model has been copied
            own = flat[self.own].clone() if self.place.sharded else flat
        if self.place.sharded:
            if self.trainable:
                self.master = own
            else:
                self.shard = own.to(self.dtype)
            for parameter in self.parameters:
                parameter.data = torch.empty(0, dtype=self.dtype, device=device)
                guard(parameter)
            return
        self.whole = flat if flat.dtype == self.dtype else self._new_whole(self.dtype).copy_(flat)
        self._whole_views = self.views(self.whole)
        self.bind_whole()
        if self.trainable:
            self.master = self._master_of(flat)
        self._seen = [(p.data_ptr(), p._version) for p in self.parameters]

    def _new_whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Room [n] for all weights; in memory that refreshes can gather into, where these will be refreshed."""
        travels = not self.place.sharded and self.trainable and not self.optimizer_whole and dtype == self.dtype
        if travels and self.communicator.world_size > 1:
            return self.communicator.allocate(self.layout.numel * dtype.itemsize).view(dtype)
        return torch.empty(self.layout.numel, dtype=dtype, device=self.communicator.device)

    def _await_weights(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's shard [n/N] of weights that a file will bring; nothing whole is allocated for them."""
        own = torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.communicator.device)
        for place, low, high in self.layout.in_shard(self.communicator.rank):
            start = place.start - self.own.start
            own[start + low : start + high] = unknown((high - low,), dtype)
        for parameter in self.parameters:
            stop_waiting(parameter)
        return own

    def _master_of(self, flat: torch.Tensor) -> torch.Tensor:
        """The master inside the weights themselves where they are precise enough, else a copy of its own."""
        part = flat if self.optimizer_whole else flat[self.own]
        return part.detach() if flat is self.whole else part.clone()

    def train(self) -> None:
        """Let a sharded buffer that was frozen, and whose parameters have optimizer groups, be trained from now on.

        The shard becomes the master. Not collective; every rank does it.
        """
        assert self.shard is not None and self._later_spans
        given = self.shard.dtype
        self.master = self.shard.to(given if given in HIGH_PRECISION else torch.float32)
        self.shard = None
        self.trainable, self.group_spans = True, self._later_spans

    # ------------------------------------------------------------------------------------------ weights for computing
    def bind(self, views: Sequence[torch.Tensor]) -> None:
        """Let the parameters be these views, but for lent ones."""
        for index, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            if index not in self.lent:
                unguard(parameter)
                parameter.data = view

    def bind_whole(self) -> None:
        self.bind(self._whole_views)

    def guard(self) -> None:
        """Let every read of the parameters go through their runtime, but for lent ones."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.lent:
                guard(parameter)

    def unbind(self, placeholder: torch.Tensor) -> None:
        """Let the parameters be empty and guarded: a stale read would silently see another unit's weights."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.lent:
                unguard(parameter)
                parameter.data = placeholder
                guard(parameter)

    def bind_one(self, index: int, view: torch.Tensor) -> None:
        """Let one sharded parameter be this view, whatever becomes of its unit, until `unbind_one`."""
        self.lent.add(index)
        parameter = self.parameters[index]
        unguard(parameter)
        parameter.data = view
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]

    def unbind_one(self, index: int) -> None:
        """Let one sharded parameter be empty and guarded again."""
        self.lent.discard(index)
        parameter = self.parameters[index]
        unguard(parameter)
        parameter.data = torch.empty(0, dtype=self.dtype, device=self.communicator.device)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
        guard(parameter)

    def local_part(self, index: int) -> tuple[slice, slice] | None:
        """Where one parameter lies in `master` and its flattened self on this rank; None when no element is here."""
        parameter = self.layout.ranges[index]
        low, high = (
            (0, self.numel) if self.master is not None and self.optimizer_whole else (self.own.start, self.own.stop)
        )
        part = parameter.overlap(low, high)
        if part is None:
            return None
        start = parameter.start - low
        return slice(start + part[0], start + part[1]), slice(*part)

    def write(self, index: int, values: torch.Tensor, where: torch.Tensor | None = None) -> None:
        """Overwrite one parameter's weights with `values` (its shape, whole), only where `where` is true if given.

        Masters and weights kept here follow at once; what lies in a slot now does not. Every rank calls it.
        """
        flat_values = values.detach().reshape(-1)
        part = self.local_part(index)
        kept = self.shard if self.master is None else self.master
        if part is not None and kept is not None:
            here, inside = part
            new = flat_values[inside].to(kept)
            kept[here] = new if where is None else torch.where(where.reshape(-1)[inside], new, kept[here])
        if self.whole is not None:
            self._whole_views[index].view(-1).copy_(flat_values)

    @torch.no_grad()
    def take_edits(self) -> None:
        """Take over into the masters what was written into whole parameters since the last time, or put in their place.

        Not collective: each rank takes its own part. What did not change keeps the precision of its master.

        Raises:
            ModelError: a parameter has another shape than before, or no values.
        """
        # A parameter that is being refreshed cannot be touched unseen.
        if self.whole is None or self._refresh is not None:
            return
        now = [(p.data_ptr(), p._version) for p in self.parameters]
        if now == self._seen:
            return
        for index, parameter in enumerate(self.parameters):
            if now[index] != self._seen[index]:
                self._take_edit(index, parameter, moved=now[index][0] != self._seen[index][0])
        self._seen = [(p.data_ptr(), p._version) for p in self.parameters]

    def _take_edit(self, index: int, parameter: nn.Parameter, moved: bool) -> None:
        view, master = self._whole_views[index], self.master
        if parameter.shape != view.shape or parameter.is_meta != view.is_meta:
            raise ModelError(
                f"parameter '{self.names[index]}' was given data of shape {list(parameter.shape)} on the {parameter.device.type} device; "
                f"the engine needs {list(view.shape)} on {view.device.type}, so give it that or rebuild the engine"
            )
        if moved:
            view.copy_(parameter)
            parameter.data = view
        part = self.local_part(index)
        if master is not None and part is not None and master.dtype != self.dtype:
            here, inside = part
            new = view.reshape(-1)[inside]
            master[here] = torch.where(new == master[here].to(new.dtype), master[here], new.to(master.dtype))

    def free(self) -> None:
        """Let go of masters and shards; whole weights stay the parameters' own, and forget this buffer."""
        self.master = self.shard = None
        if not self.place.sharded:
            for parameter in self.parameters:
                del parameter._onecopy  # type: ignore[attr-defined]

    def fill_own(self, own: torch.Tensor) -> None:
        """Cast this rank's weights into its part [n/N] of a whole buffer of the compute dtype."""
        source = self.shard if self.master is None else self.owned(self.master)
        assert source is not None
        own.copy_(source)

    # ----------------------------------------------------------------------------- whole weights after the master moved
    def start_refresh(self) -> None:
        """Start to bring `whole` up to the masters; `finish_refresh` is called before the parameters are used.

        Collective when the optimizer's place is sharded; else every rank casts its own whole master.
        """
        if self.whole is None or self.master is None:
            return
        if self.optimizer_whole or self.communicator.world_size == 1:
            if self.whole.data_ptr() != self.master.data_ptr():
                self.whole.copy_(self.master)
            return
        self.finish_refresh()
        if self._wire is None:
            self._wire = self.communicator.wire(self.whole)
        wire = self._wire
        if wire.own.data_ptr() != self.owned(self.master).data_ptr():  # else the master is the weights themselves
            self.fill_own(wire.own)
        self._refresh = self.communicator.start_gather(wire, self.key, self.label)
        for parameter in self.parameters:
            guard(parameter)

    def finish_refresh(self) -> None:
        """Wait for a refresh in flight, if there is one. Not collective."""
        if self._refresh is not None:
            self._refresh.drain()
            self._refresh = None
            for parameter in self.parameters:
                unguard(parameter)

    @property
    def refreshing(self) -> bool:
        return self._refresh is not None


def _spans(layout: FlatLayout, group_of: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge the neighbours of one optimizer group: (group, start, stop), paddings included, covering the whole buffer."""
    spans: list[tuple[int, int, int]] = []
    for parameter, group in zip(layout.ranges, group_of, strict=True):
        if spans and spans[-1][0] == group:
            spans[-1] = (group, spans[-1][1], parameter.aligned_stop)
        else:
            spans.append((group, parameter.start, parameter.aligned_stop))
    if spans:
        group, start, _ = spans[-1]
        spans[-1] = (group, start, layout.numel)
    return spans
