"""Activation checkpointing: compute a block again in the backward instead of keeping what its forward left.

`checkpoint` calls a function and keeps only its inputs; `configure` says where these wait (`storage`): as they are, on
the host, shared out over the model-parallel ranks, or in one buffer. `blocks` wraps a model's blocks by itself,
`compiled` compiles them.
"""

from onecopy.activations.checkpoint import checkpoint
from onecopy.activations.settings import configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
