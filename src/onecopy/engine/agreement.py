"""At start-up all ranks must hold one model: checked by names and shapes, and rank 0's weights win where values differ."""

from collections.abc import Sequence

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.errors import ModelError
from onecopy.sharding.pending import is_pending


def agree_on_model(model: nn.Module, communicator: Communicator) -> bool:
    """Make every rank's parameters and buffers those of rank 0. Collective.

    Returns:
        Whether values differed and were broadcast.

    Raises:
        ModelError: parameters differ in name, shape, dtype or requires_grad; names the first difference, on every rank.
    """
    if communicator.world_size == 1 or communicator.imagined:
        return False
    tensors = [*model.named_parameters(), *model.named_buffers()]
    _compare_descriptions([(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors], communicator)
    # Weights that are sharded already are one model's, and those that a file will bring are nobody's yet.
    tensors = [(name, tensor) for name, tensor in tensors if tensor.numel() and not is_pending(tensor)]
    values = [tensor.detach() for _, tensor in tensors]
    if not values:
        return False
    device = communicator.device
    prints = torch.stack([_fingerprint(value).to(device) for value in values])
    everyone = communicator.sum_vector(prints.flatten(), "weights' fingerprints").view_as(prints)
    spread = communicator.sum_vector(
        (everyone / communicator.world_size - prints).abs().flatten(), "fingerprints' spread"
    ).view_as(prints)
    differs = communicator.read((spread > 1e-9 * (1 + prints.abs()) * communicator.world_size).any(dim=1))
    if differs is None or not any(differs):
        return False
    for differ, value, (name, _) in zip(differs, values, tensors, strict=True):
        if differ:
            moved = value.to(device).contiguous()
            communicator.broadcast(moved, 0, name)
            value.copy_(moved)
    return True


def _fingerprint(value: torch.Tensor) -> torch.Tensor:
    """Two float64 numbers that differ when the values (or their order) do; [2]."""
    flat = value.flatten()
    wide = (
        flat.to(torch.float64)
        if flat.dtype != torch.complex64
        else torch.view_as_real(flat).flatten().to(torch.float64)
    )
    wide = torch.nan_to_num(wide)
    ramp = torch.arange(wide.numel(), device=wide.device, dtype=torch.float64).remainder_(1009).add_(1)
    return torch.stack([wide.sum(), wide.mul_(ramp).sum()])


def _compare_descriptions(mine: Sequence[tuple[str, tuple[int, ...], str, bool]], communicator: Communicator) -> None:
    digest = hash_of(mine)
    if len(set(communicator.exchange(digest, "model description"))) == 1:
        return
    everyone = communicator.exchange(list(mine), "model description")
    for rank, other in enumerate(everyone):
        for place, (here, there) in enumerate(zip(everyone[0], other, strict=False)):
            if here != there:
                raise ModelError(
                    f"ranks built different models: parameter {place} is {_describe(here)} on rank 0 "
                    f"and {_describe(there)} on rank {rank}; "
                    "build the same model (and freeze the same parameters) on every rank"
                )
        if len(other) != len(everyone[0]):
            raise ModelError(
                f"ranks built different models: rank 0 has {len(everyone[0])} parameters and buffers, rank {rank} has {len(other)}; "
                "build the same model on every rank"
            )


def _describe(entry: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, trained = entry
    return f"'{name}' of shape {list(shape)}, {dtype}{', trained' if trained else ', frozen'}"


def hash_of(value: object) -> int:
    """A number for `value` that is the same in every process (unlike `hash` of strings)."""
    import zlib

    return zlib.crc32(repr(value).encode())
