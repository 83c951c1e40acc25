"""The functions of DeepSpeed's `zero_to_fp32` by their names and arguments, on our checkpoints."""

from __future__ import annotations

import os

import torch
from torch import nn

from onecopy.checkpoint.export import export, find, weights_of
from onecopy.checkpoint.reader import RangeReader
from onecopy.observe.log import warn

Folder = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """The fp32 weights and buffers of a checkpoint under all their names, on the host. Not collective.

    Tied weights are one tensor. `lazy_mode` is accepted and changes nothing: nothing but the result is ever held.
    """
    path, manifest = find(checkpoint_dir, tag)
    found: dict[str, torch.Tensor] = {}
    with RangeReader(path, manifest) as reader:
        for weight in weights_of(manifest.model, torch.float32, exclude_frozen_parameters):
            empty = 0 in weight.shape
            value = torch.empty(weight.shape) if empty else reader.whole(f"model.{weight.name}", weight.dtype)
            found.update(dict.fromkeys((weight.name, *weight.aliases), value))
    return found


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights as `pytorch_model.bin` (or `model.safetensors`), in shards with an index where larger."""
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    export(checkpoint_dir, output_dir, "fp32", max_shard_size, tag, name, exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> nn.Module:
    """Load the fp32 weights into a plain model on the host, which is returned; names that only one of them has are warned of."""
    model = model.cpu()
    lacks = model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    for one, names in (("checkpoint", lacks.missing_keys), ("model", lacks.unexpected_keys)):
        if names:
            warn(
                f"{checkpoint_dir}: the {one} lacks {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            )
    return model
