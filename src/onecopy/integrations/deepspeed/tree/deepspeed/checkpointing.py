"""`deepspeed.checkpointing`, importable as a module too."""

from .runtime.activation_checkpointing.checkpointing import *  # noqa: F403
