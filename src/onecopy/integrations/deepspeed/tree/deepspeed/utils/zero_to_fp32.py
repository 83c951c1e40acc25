"""From a checkpoint to fp32 weights."""

import io
from pathlib import Path
from typing import Any

from onecopy.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from onecopy.checkpoint.state import NAME, from_bytes, to_bytes
from onecopy.integrations.deepspeed.refusal import refused_function

_FILES = "a checkpoint of onecopy has other files; read it with get_fp32_state_dict_from_zero_checkpoint"
get_model_state_files = refused_function("utils.zero_to_fp32.get_model_state_files", _FILES)
parse_model_states = refused_function("utils.zero_to_fp32.parse_model_states", _FILES)
parse_optim_states = refused_function("utils.zero_to_fp32.parse_optim_states", _FILES)
convert_zero_checkpoint_to_state_dict = refused_function(
    "utils.zero_to_fp32.convert_zero_checkpoint_to_state_dict", "use `onecopy export`, which writes any dtype"
)


def get_model_state_file(checkpoint_dir: Any, zero_stage: int) -> io.BytesIO:
    """What `torch.load` reads as the user's client state. `checkpoint_dir` is the folder of one tag."""
    return io.BytesIO(to_bytes(_state(checkpoint_dir)["client_state"]))


def get_optim_files(checkpoint_dir: Any) -> list[io.BytesIO]:
    """One file that `torch.load` reads as the stage the checkpoint was saved at, and no optimizer state."""
    config = _state(checkpoint_dir)["config"] or {}
    zero = config.get("zero_optimization")
    stage = int(zero.get("stage") or 0) if isinstance(zero, dict) else int(bool(zero))
    return [io.BytesIO(to_bytes({"optimizer_state_dict": {"zero_stage": stage}}))]


def _state(folder: Any) -> dict[str, Any]:
    path = Path(folder) / NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no checkpoint of onecopy: there is no {NAME}")
    found: dict[str, Any] = from_bytes(path.read_bytes(), str(path))
    return found


__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "parse_model_states",
    "parse_optim_states",
]
