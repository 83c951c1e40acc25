"""Modules that integrations import by their place in DeepSpeed's tree."""

from . import (
    activation_checkpointing,
    base_optimizer,
    bf16_optimizer,
    checkpoint_engine,
    compiler,
    config,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "bf16_optimizer",
    "checkpoint_engine",
    "compiler",
    "config",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "utils",
    "zero",
]
