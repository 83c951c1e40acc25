"""Modules that integrations import by their place in DeepSpeed's tree."""

from . import activation_checkpointing, base_optimizer, config, dataloader, engine, lr_schedules, zero

__all__ = ["activation_checkpointing", "base_optimizer", "config", "dataloader", "engine", "lr_schedules", "zero"]
