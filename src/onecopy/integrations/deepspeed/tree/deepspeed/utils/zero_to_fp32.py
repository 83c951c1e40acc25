"""From a checkpoint to fp32 weights."""

from onecopy.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from onecopy.integrations.deepspeed.refusal import refused_function

_FILES = "a checkpoint of onecopy has other files; read it with get_fp32_state_dict_from_zero_checkpoint"
get_model_state_file = refused_function("utils.zero_to_fp32.get_model_state_file", _FILES)
get_model_state_files = refused_function("utils.zero_to_fp32.get_model_state_files", _FILES)
get_optim_files = refused_function("utils.zero_to_fp32.get_optim_files", _FILES)
parse_model_states = refused_function("utils.zero_to_fp32.parse_model_states", _FILES)
parse_optim_states = refused_function("utils.zero_to_fp32.parse_optim_states", _FILES)
convert_zero_checkpoint_to_state_dict = refused_function(
    "utils.zero_to_fp32.convert_zero_checkpoint_to_state_dict", "use `onecopy export`, which writes any dtype"
)

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
