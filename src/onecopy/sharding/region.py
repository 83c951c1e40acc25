"""A region: where a flat buffer lies in a slot's memory, and the views of it that every step needs, made once."""

import torch

from onecopy.sharding.flat_buffer import FlatBuffer


class Region:
    """A flat buffer's weights or gradients in a slot.

    Attributes:
        wire: its buffer [n] of `dtype`, ready to travel.
        views: the parameters' own shapes in it, in the layout's order.
    """

    __slots__ = ("views", "wire")

    def __init__(
        self,
        flat: FlatBuffer,
        memory: torch.Tensor,
        offset: int,
        dtype: torch.dtype,
        scratch: torch.Tensor | None = None,
    ) -> None:
        whole = memory[offset : offset + flat.numel * dtype.itemsize].view(dtype)
        self.views = flat.views(whole)
        if scratch is not None:
            scratch = scratch[: (flat.numel - flat.layout.shard_numel) * dtype.itemsize].view(dtype)
        self.wire = flat.communicator.wire(whole, scratch)
