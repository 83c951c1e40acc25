"""`onecopy.initialize`: join the world, resolve the configuration, build the engine, its loader and its scheduler."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import connect, ensure_process_group
from onecopy.comm.communicator import Communicator
from onecopy.comm.connect import default_device
from onecopy.comm.model_parallel import ModelParallel, model_parallel_of
from onecopy.config import Config, load
from onecopy.engine.dataloader import ShardedDataLoader
from onecopy.engine.engine import Engine
from onecopy.engine.precompiled import take_off
from onecopy.engine.weights_in_reach import weights_in_reach
from onecopy.errors import ConfigError
from onecopy.observe.log import note
from onecopy.optim.schedules import build_scheduler


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    communicator: Communicator | None = None,
) -> tuple[Engine, Any, Any, Any]:
    """Shard `model`'s training state over the ranks. Collective: every rank calls it with the same model.

    Args:
        args: an object whose `deepspeed_config` attribute is the configuration, as DeepSpeed's launcher leaves it.
        optimizer: a `torch.optim.Optimizer` over the model's parameters, or a function that makes one from parameters;
            default: what the configuration says.
        model_parameters: the parameters (or parameter groups) to train; default: all that require gradients.
        training_data: a dataset to make a loader of, each rank its part.
        lr_scheduler: a scheduler, or a function that makes one from the optimizer; the engine then steps it.
        mpu: an object whose `get_data_parallel_group()` is the group of ranks to shard over. With a
            `get_model_parallel_group()` of several ranks, norms are taken over both groups, and a parameter that is split
            between these ranks has an attribute `model_parallel` (or `tensor_model_parallel`) that is true.
        config: a dictionary, the path of a JSON file, or base64 of JSON; `config_params` is its old name.
        communicator: the ranks to shard over, already connected (a rehearsal's imagined ones); default: `comm.connect` connects the
            group that `mpu` or `mesh_param` names, or all ranks. The engine closes it.

    Returns:
        (engine, optimizer, data loader or None, scheduler or None). The optimizer is a `torch.optim.Optimizer`.

    Raises:
        ConfigError: the configuration cannot be honoured.
        ModelError: the model or its optimizer cannot be sharded as given, or ranks differ.
    """
    assert model is not None, "onecopy.initialize needs model=..."
    assert isinstance(model, nn.Module), (
        f"model is a {type(model).__name__}; onecopy.initialize needs a torch.nn.Module"
    )
    source = _only_source(args, config if config is not None else config_params)
    if dist_init_required is not False:
        ensure_process_group(port=distributed_port)
    assert communicator is None or (mpu is None and mesh_param is None), (
        "communicator= already says which ranks to shard over; leave mpu= and mesh_param= out"
    )
    group = _shard_group(mpu, mesh_param)
    ranks = communicator.world_size if communicator is not None else dist.get_world_size(group)
    resolved = source if isinstance(source, Config) else load(source, world_size=ranks)
    model_parallel = model_parallel_of(mpu)
    resolved = _told_of_ranks(resolved, model_parallel)
    if communicator is None:
        communicator = connect(group, default_device(), resolved.onecopy.timeout_seconds)
    try:
        model, compiled = take_off(model)
        with weights_in_reach(model) as awaited:
            engine = Engine(model, resolved, communicator, optimizer, model_parameters, model_parallel)
        engine.awaited = awaited
    except BaseException:
        communicator.close()
        raise
    engine._compile_again(compiled)
    try:
        engine._set_up_activations(model_parallel)
    except BaseException:
        engine.destroy()
        raise
    scheduler = _scheduler(engine, lr_scheduler, resolved)
    engine.lr_scheduler = scheduler
    engine.collate_fn = collate_fn
    loader = None
    if training_data is not None:
        loader = ShardedDataLoader(
            training_data,
            engine.train_micro_batch_size_per_gpu(),
            communicator.rank,
            communicator.world_size,
            collate_fn,
            resolved.dataloader_drop_last,
        )
        engine.training_dataloader = loader
    return engine, engine.optimizer, loader, scheduler


def _only_source(args: Any, config: Any) -> Any:
    """The configuration, given once: as an argument or inside `args`."""
    inside = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    assert config is None or inside is None, (
        "the configuration is given twice, as config= and as args.deepspeed_config; leave one out"
    )
    source = config if config is not None else inside
    assert source is not None, "onecopy.initialize needs config=... (a dictionary or the path of a JSON file)"
    local_rank = getattr(args, "local_rank", None)
    if (
        isinstance(local_rank, int)
        and local_rank >= 0
        and "LOCAL_RANK" in os.environ
        and int(os.environ["LOCAL_RANK"]) != local_rank
    ):
        raise ConfigError(
            f"args.local_rank is {local_rank} but the environment's LOCAL_RANK is {os.environ['LOCAL_RANK']}; pass the launcher's value"
        )
    return source


def _shard_group(mpu: Any, mesh: Any) -> dist.ProcessGroup | None:
    if mpu is not None:
        get = getattr(mpu, "get_data_parallel_group", None)
        if get is None:
            raise ConfigError(
                f"mpu is a {type(mpu).__name__} without get_data_parallel_group(); onecopy shards over the group it returns"
            )
        group: dist.ProcessGroup = get()
        return group
    if mesh is not None:
        raise ConfigError(
            "mesh_param is not supported; pass mpu= with get_data_parallel_group(), or leave it out to shard over all ranks"
        )
    return None


def _told_of_ranks(config: Config, model_parallel: ModelParallel | None) -> Config:
    """The configuration with a report that knows whether there are model-parallel ranks to partition inputs over."""
    if not config.activation_checkpointing.partition_activations or model_parallel is not None:
        return config
    path = "activation_checkpointing.partition_activations"
    text = "initialize was given no mpu with a model-parallel group of several ranks, so there is nothing to partition"
    note(f"{path}: {text}")
    findings = (
        replace(one, verdict="ignored", message=text) if one.key_path == path else one for one in config.findings
    )
    return replace(config, findings=tuple(findings))


def _scheduler(engine: Engine, given: Any, config: Config) -> Any:
    if given is not None:
        is_factory = callable(given) and not hasattr(given, "step")
        return given(engine.optimizer) if is_factory else given
    if config.scheduler is not None and engine.optimizer is not None:
        return build_scheduler(config.scheduler.type, dict(config.scheduler.params), engine.optimizer)
    return None
