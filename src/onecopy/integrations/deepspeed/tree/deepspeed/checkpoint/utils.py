"""Tensors made ready for `torch.save`."""

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """The same structure with tensors copied to `device`, so that no view drags its whole storage into a file."""

    def copy(value: Any) -> Any:
        return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value

    return torch.utils._pytree.tree_map(copy, item)
