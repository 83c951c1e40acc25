"""`DeepSpeedConfig`: a resolved configuration with DeepSpeed's attributes beside the JSON document's own keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from onecopy.config import Config, load


class DeepSpeedConfig:
    """A configuration resolved for the ranks of this run; `resolved` is onecopy's, whose fields are attributes here too.

    Args:
        config: a dictionary, the path of a JSON file, or base64 of JSON.
        mpu: an object whose `get_data_parallel_world_size()` is the number of ranks to divide batches over.

    Raises:
        DeepSpeedConfigError: the configuration cannot be honoured.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        ranks = mpu.get_data_parallel_world_size() if mpu is not None else None
        if ranks is None:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._take(load(config, world_size=ranks))

    @classmethod
    def of(cls, resolved: Config) -> DeepSpeedConfig:
        """The view of a configuration that is resolved already."""
        made = cls.__new__(cls)
        made._take(resolved)
        return made

    def _take(self, resolved: Config) -> None:
        self.resolved = resolved
        optimizer, scheduler, checkpoint = resolved.optimizer, resolved.scheduler, resolved.checkpoint
        source = resolved.source
        self._param_dict = source
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.zero_config = resolved.zero
        self.zero_optimization_stage = resolved.zero.stage
        self.zero_enabled = resolved.zero.stage > 0
        self.zero_force_ds_cpu_optimizer = bool(source.get("zero_force_ds_cpu_optimizer", True))
        self.float16_config, self.bfloat16_config = resolved.fp16, resolved.bf16
        self.grad_accum_dtype = source.get("data_types", {}).get("grad_accum_dtype")
        self.optimizer_name = None if optimizer is None else _as_deepspeed_writes(optimizer.type)
        self.optimizer_params = None if optimizer is None else optimizer.params
        self.optimizer_legacy_fusion = False
        self.scheduler_name = None if scheduler is None else scheduler.type
        self.scheduler_params = None if scheduler is None else scheduler.params
        self.activation_checkpointing_config = resolved.activation_checkpointing
        self.checkpoint_config = checkpoint
        self.checkpoint_tag_validation_enabled = checkpoint.tag_validation.lower() != "ignore"
        self.checkpoint_tag_validation_fail = checkpoint.tag_validation.lower() == "fail"
        self.load_universal_checkpoint = checkpoint.load_universal
        self.use_node_local_storage = checkpoint.use_node_local_storage
        self.torch_autocast_enabled = resolved.torch_autocast.enabled
        self.torch_autocast_dtype = resolved.torch_autocast.dtype
        self.monitor_config = monitor_settings(resolved)
        self.disable_allgather = bool(source.get("disable_allgather", False))

    def __getattr__(self, name: str) -> Any:
        if name == "resolved" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.resolved, name)

    def print(self, name: str) -> None:
        """Print the effective configuration as a table."""
        print(f"{name}:\n{self.resolved.report()}")


def monitor_settings(resolved: Config) -> SimpleNamespace:
    """The blocks of the monitors, and whether any is switched on."""
    blocks = {name: getattr(resolved, name) for name in ("tensorboard", "csv_monitor", "wandb", "comet")}
    return SimpleNamespace(**blocks, enabled=any(block.enabled for block in blocks.values()))


_WITHOUT_CASE = ("adagrad", "adam", "adamw", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")


def _as_deepspeed_writes(name: str) -> str:
    """Names that DeepSpeed reads without regard to case are lower case there; others are torch's classes."""
    return name.lower() if name.lower() in _WITHOUT_CASE else name
