"""`deepspeed.zero`: building and reading sharded models."""

from .runtime.zero import *  # noqa: F403
