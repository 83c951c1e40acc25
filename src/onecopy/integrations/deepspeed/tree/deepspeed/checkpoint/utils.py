"""Tensors made ready for `torch.save`."""

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """The same structure with tensors copied to `device`, so that no view drags its whole storage into a file.

    Tied weights are copied once and stay tied, so that they are written once.
    """
    copies: dict[Any, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or place not in copies:
            copies[place] = value.detach().to(device, copy=True)
        return copies[place]

    return torch.utils._pytree.tree_map(copy, item)
