"""Loaders."""

from onecopy.engine.dataloader import ShardedDataLoader as DeepSpeedDataLoader
from onecopy.utils import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
