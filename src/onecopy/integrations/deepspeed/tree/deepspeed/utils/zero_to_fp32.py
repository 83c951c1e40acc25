"""From a checkpoint to fp32 weights."""

import functools
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onecopy import checkpoint
from onecopy.checkpoint.export import export
from onecopy.checkpoint.state import NAME, from_bytes, to_bytes
from onecopy.integrations.deepspeed.recovery import main
from onecopy.integrations.deepspeed.refusal import refused_function

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_FILES = "a checkpoint of onecopy has other files; read it with get_fp32_state_dict_from_zero_checkpoint"
get_model_state_files = refused_function("utils.zero_to_fp32.get_model_state_files", _FILES)
parse_model_states = refused_function("utils.zero_to_fp32.parse_model_states", _FILES)
parse_optim_states = refused_function("utils.zero_to_fp32.parse_optim_states", _FILES)


def _where_the_tag_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's error for a tag that is not there: FileNotFoundError."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        tag, folder = given.get("tag"), Path(given["checkpoint_dir"])
        if tag is not None and folder.is_dir() and not (folder / str(tag)).is_dir():
            raise FileNotFoundError(f"there is no checkpoint '{tag}' in {folder}")
        return function(*args, **kwargs)

    return call


convert_zero_checkpoint_to_fp32_state_dict = _where_the_tag_is(checkpoint.convert_zero_checkpoint_to_fp32_state_dict)
get_fp32_state_dict_from_zero_checkpoint = _where_the_tag_is(checkpoint.get_fp32_state_dict_from_zero_checkpoint)
load_state_dict_from_zero_checkpoint = _where_the_tag_is(checkpoint.load_state_dict_from_zero_checkpoint)


@_where_the_tag_is
def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights in a dtype as `pytorch_model.bin` (or `model.safetensors`), in shards with an index where larger."""
    if dtype not in _NAMES:
        raise ValueError(f"dtype is {dtype}; write one of {', '.join(map(str, _NAMES))}")
    name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    export(checkpoint_dir, output_dir, _NAMES[dtype], max_shard_size, tag, name, exclude_frozen_parameters)


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
    "main",
    "parse_model_states",
    "parse_optim_states",
]

if __name__ == "__main__":
    main()
