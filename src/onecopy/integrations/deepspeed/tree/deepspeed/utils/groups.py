"""Groups of ranks: all of them are data-parallel, unless an mpu was given to `initialize` (or to `groups.initialize`)."""

from typing import Any

import torch.distributed as dist

from onecopy.integrations.deepspeed.refusal import NotOffered, refused_function

_NO_SEQUENCE = "sequence parallelism is not in onecopy; build the group with torch.distributed and pass mpu="
_NO_EXPERTS = "expert parallelism is not in onecopy; mark expert blocks with zero_optimization.leaf_module instead"
_NO_INNER_GROUP = "hpZ is not in onecopy; all ranks share each parameter"

_get_sequence_parallel_group = refused_function("utils.groups._get_sequence_parallel_group", _NO_SEQUENCE)
_get_expert_parallel_group = refused_function("utils.groups._get_expert_parallel_group", _NO_EXPERTS)
_get_expert_data_parallel_group = refused_function("utils.groups._get_expert_data_parallel_group", _NO_EXPERTS)
_get_zero_param_intra_parallel_group = refused_function(
    "utils.groups._get_zero_param_intra_parallel_group", _NO_INNER_GROUP
)
_create_zero_param_parallel_group = refused_function("utils.groups._create_zero_param_parallel_group", _NO_INNER_GROUP)

mpu: Any = None


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Answer with the groups of this mpu from now on. Expert parallelism is refused."""
    if ep_size != 1:
        raise NotOffered(f"utils.groups.initialize: ep_size={ep_size} is not offered by onecopy: {_NO_EXPERTS}")
    globals()["mpu"] = mpu


def get_data_parallel_group() -> Any:
    return mpu.get_data_parallel_group() if mpu is not None else dist.group.WORLD


def get_data_parallel_world_size() -> int:
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    return dist.get_rank(get_data_parallel_group())


def _get_data_parallel_group_ranks() -> list[int]:
    return list(dist.get_process_group_ranks(get_data_parallel_group()))


def _get_broadcast_src_rank() -> int:
    """The rank in the world that this rank's data-parallel group starts from."""
    return _get_data_parallel_group_ranks()[0]


def get_model_parallel_group() -> Any:
    if mpu is None:
        raise NotOffered("utils.groups: there is no model-parallel group; give groups.initialize an mpu that has one")
    return mpu.get_model_parallel_group()


def get_model_parallel_world_size() -> int:
    return 1 if mpu is None else int(mpu.get_model_parallel_world_size())


def get_model_parallel_rank() -> int:
    return 0 if mpu is None else int(mpu.get_model_parallel_rank())


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_expert_model_parallel_world_size() -> int:
    return 1


def _zero_param_parallel_is_initialized() -> bool:
    return False


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_group = get_model_parallel_group
