"""The `ds_*` attributes that other libraries read from parameters at stage 3."""

from collections.abc import Sequence

import torch

from onecopy.comm import Communicator
from onecopy.config import Config
from onecopy.sharding import Unit, ZeroParamStatus


def mark_parameters(units: Sequence[Unit], config: Config, communicator: Communicator) -> None:
    """Set ds_id, ds_shape, ds_numel, ds_status, ds_persist and ds_process_group on every parameter, at stage 3 only."""
    if config.zero.stage != 3:
        return
    number = 0
    for unit in units:
        for flat in unit.buffers:
            for parameter, place in zip(flat.parameters, flat.layout.ranges, strict=True):
                attributes = {
                    "ds_id": number,
                    "ds_shape": torch.Size(place.shape),
                    "ds_numel": place.numel,
                    "ds_persist": not flat.place.sharded,
                    "ds_status": ZeroParamStatus.NOT_AVAILABLE if flat.place.sharded else ZeroParamStatus.AVAILABLE,
                    "ds_process_group": communicator.group,
                }
                for name, value in attributes.items():
                    setattr(parameter, name, value)
                number += 1
