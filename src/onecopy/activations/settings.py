"""What `configure` and the JSON block say about checkpointing; one setting for the process, the last one said."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

from onecopy.activations.contiguous import ContiguousBuffers
from onecopy.activations.profile import Profile
from onecopy.activations.storage import Storage
from onecopy.comm.model_parallel import ModelParallel, model_parallel_of
from onecopy.config import ActivationCheckpointingConfig, Config, load
from onecopy.config.sources import read_source
from onecopy.errors import ConfigError


@dataclass
class Settings:
    """The configuration in force.

    Attributes:
        block: what was asked for.
        owner: the engine whose block or ranks these are, if any.
        configured: whether `configure` or an engine's block put the block in force; `by_engine`: the latter.
        storage: where inputs wait; `profile`: what times them, if asked for.
    """

    block: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    ranks: ModelParallel | None = None
    owner: weakref.ref[object] | None = None
    configured: bool = False
    by_engine: bool = False
    storage: Storage = field(default_factory=Storage)
    profile: Profile | None = None

    def __post_init__(self) -> None:
        block = self.block
        count = block.number_checkpoints
        buffers = ContiguousBuffers(count) if block.contiguous_memory_optimization and count is not None else None
        self.storage = Storage(self.ranks if block.partition_activations else None, block.cpu_checkpointing, buffers)
        self.profile = Profile(self.storage.held) if block.profile else None


_current = Settings()


def current() -> Settings:
    """The configuration in force."""
    return _current


def apply(block: ActivationCheckpointingConfig, ranks: ModelParallel | None, owner: object = None) -> None:
    """Put a configuration in force, an engine's where one is given. Not collective."""
    global _current
    if owner is None:
        _current = Settings(block, ranks if ranks is not None else _current.ranks, _current.owner, True)
    else:
        _current = Settings(block, ranks, weakref.ref(owner), True, by_engine=True)


def know_ranks(ranks: ModelParallel, owner: object) -> None:
    """An engine without a block has model-parallel ranks: what `configure` said, before or later, may be about them."""
    global _current
    if _current.ranks is None:
        _current = Settings(_current.block, ranks, weakref.ref(owner), _current.configured)


def forget(owner: object) -> None:
    """An engine is gone: its block and its ranks are too; what `configure` said stays."""
    global _current
    if _current.owner is not None and _current.owner() is owner:
        said = _current.configured and not _current.by_engine
        _current = Settings(_current.block, configured=True) if said else Settings()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say where inputs of checkpointed functions wait. `initialize` does it for the JSON block; the last call counts.

    Args:
        mpu_: its model-parallel group is what activations are partitioned over; None: the one that was given before.
        deepspeed_config: a configuration whose block `activation_checkpointing` is read; the other arguments override it.

    Raises:
        ConfigError: contiguous memory without partitioning, or without a number of checkpoints.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    block = ActivationCheckpointingConfig() if deepspeed_config is None else _block(deepspeed_config)
    values: dict[str, Any] = {name: getattr(block, name) if value is None else value for name, value in given.items()}
    if values["contiguous_memory_optimization"]:
        for name in ("partition_activations", "number_checkpoints"):
            if not values[name]:
                raise ConfigError(f"checkpointing.configure: contiguous_checkpointing needs {name} too; give it")
    apply(ActivationCheckpointingConfig(**values), model_parallel_of(mpu_) if mpu_ is not None else None)


def _block(source: Any) -> ActivationCheckpointingConfig:
    """The block alone: the rest of the document may need what only `initialize` knows."""
    if isinstance(source, Config):
        return source.activation_checkpointing
    block = read_source(source).get("activation_checkpointing")
    return load({"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": block}, 1).activation_checkpointing


def set_num_layers(count: int) -> None:
    """Say how many checkpoints are alive at a time: the size of the contiguous buffers."""
    apply(replace(_current.block, number_checkpoints=count), None)


def partition_activations_in_checkpoint(partition: bool) -> None:
    """Switch the partitioning of inputs on or off; the rest of the configuration stays."""
    apply(replace(_current.block, partition_activations=bool(partition)), None)


def is_configured() -> bool:
    """Whether `configure` was called, or `initialize` was given the JSON block."""
    return _current.configured


def reset() -> None:
    """Let go of the contiguous buffers; what checkpoints still hold stays theirs."""
    if _current.storage.buffers is not None:
        _current.storage.buffers = ContiguousBuffers(_current.storage.buffers.count)
