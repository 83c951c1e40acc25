"""`deepspeed.comm` by its place in DeepSpeed's tree."""

from . import *  # noqa: F403
