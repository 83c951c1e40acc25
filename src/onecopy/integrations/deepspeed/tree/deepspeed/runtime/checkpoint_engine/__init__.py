"""Single files beside a checkpoint."""

from . import checkpoint_engine, torch_checkpoint_engine

__all__ = ["checkpoint_engine", "torch_checkpoint_engine"]
