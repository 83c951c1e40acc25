"""The `ds_*` attributes that other libraries read from parameters at stage 3."""

from collections.abc import Sequence

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.config import Config
from onecopy.sharding import Unit, ZeroParamStatus
from onecopy.sharding.early import METHODS


def mark_parameters(model: nn.Module, units: Sequence[Unit], config: Config, communicator: Communicator) -> None:
    """Set ds_id, ds_shape, ds_numel, ds_status, ds_persist and ds_process_group on every parameter, at stage 3 only.

    Frozen parameters in a world of one rank, and those without elements, are in no flat buffer: they are always whole.
    """
    if config.zero.stage != 3:
        return
    placed = [
        (parameter, torch.Size(place.shape), flat.place.sharded)
        for unit in units
        for flat in unit.buffers
        for parameter, place in zip(flat.parameters, flat.layout.ranges, strict=True)
    ]
    known = {id(parameter) for parameter, *_ in placed}
    placed += [(parameter, parameter.shape, False) for parameter in model.parameters() if id(parameter) not in known]
    for number, (parameter, shape, sharded) in enumerate(placed):
        attributes = {
            "ds_id": number,
            "ds_shape": shape,
            "ds_numel": shape.numel(),
            "ds_persist": not sharded,
            "ds_status": ZeroParamStatus.NOT_AVAILABLE if sharded else ZeroParamStatus.AVAILABLE,
            "ds_process_group": communicator.group,
        }
        for name, value in attributes.items():
            setattr(parameter, name, value)


def unmark_parameters(model: nn.Module) -> None:
    """Take DeepSpeed's attributes off: one of them keeps a process group, and others say that an engine shards the parameter."""
    vars(model).pop("ds_external_parameters", None)
    for parameter in model.parameters():
        for name in [name for name in vars(parameter) if name.startswith("ds_") or name in METHODS]:
            delattr(parameter, name)
