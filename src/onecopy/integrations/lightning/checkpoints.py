"""Checkpoints of the strategies: a folder like `epoch=0-step=10.ckpt/` that holds the engine's checkpoint `checkpoint/`.

A folder loads at any stage and number of ranks. Single files that other strategies wrote load too, weights only, and
`single_file` turns a folder into one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from onecopy.checkpoint import get_fp32_state_dict_from_zero_checkpoint
from onecopy.checkpoint.state import NAME as STATE_FILE
from onecopy.checkpoint.state import from_bytes
from onecopy.errors import CheckpointError

TAG = "checkpoint"


def find_folder(path: str | os.PathLike[str]) -> Path | None:
    """The checkpoint's folder: `path`, or the one that `path` lies in; None when `path` is a single file.

    Raises:
        CheckpointError: there is nothing at `path`, or a folder that is no checkpoint.
    """
    given = Path(path)
    for folder in (given, given.parent, given.parent.parent):
        if (folder / TAG / STATE_FILE).is_file():
            return folder
    if given.is_file():
        return None
    what = "is a folder, but holds no checkpoint of onecopy" if given.is_dir() else "does not exist"
    raise CheckpointError(f"checkpoint {given} {what}; give the folder that the Trainer or Fabric saved")


def read_single_file(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint that Lightning wrote as one file, on the CPU. Not collective."""
    found = torch.load(path, map_location="cpu", weights_only=True if weights_only is None else weights_only)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a checkpoint of Lightning")
    return found


def single_file(folder: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Write the checkpoint in `folder` as one file for `LightningModule.load_from_checkpoint` and other strategies.

    It has the fp32 weights, hyper-parameters and everything else the Trainer saved but the optimizer's state. Not
    collective; needs no ranks and no GPU. Memory: the whole model.
    """
    found = find_folder(folder)
    if found is None:
        raise CheckpointError(f"{folder} is a single file already")
    content = from_bytes((found / TAG / STATE_FILE).read_bytes(), str(found / TAG / STATE_FILE))
    state = dict(content["client_state"])
    state["state_dict"] = get_fp32_state_dict_from_zero_checkpoint(str(found), TAG)
    torch.save(state, output)
