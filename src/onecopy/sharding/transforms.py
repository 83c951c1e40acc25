"""torch.func's transforms (grad, vmap, jvp and others), which run a model on tensors of their own around ours."""

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from onecopy.errors import ModelError
from onecopy.sharding import messages
from onecopy.sharding.unit import Unit


def inside_transform() -> bool:
    """Whether one is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def prepare_for_transform(units: list[Unit]) -> None:
    """Let whole weights arrive before a transform goes on: inside it memory of ours cannot be written. Not collective.

    Raises:
        ModelError: weights are sharded, which would be gathered outside of the transform.
    """
    if any(unit.sharded for unit in units):
        raise ModelError(messages.transformed())
    with temporarily_clear_interpreter_stack():
        for unit in units:
            unit.finish_refresh()
