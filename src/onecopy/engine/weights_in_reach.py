"""Before a model is sharded: its parameters have shapes and its buffers values, wherever the weights are.

Models come with their weights, or sharded by `zero.Init`, or without any on the meta device. Of the last kind the engine
waits for a file, and a forward before that is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from onecopy.engine.meta_buffers import materialise_buffers
from onecopy.errors import ModelError
from onecopy.sharding.early_parameter import resume_construction, suspend_construction
from onecopy.sharding.pending import shapes_revealed


class AwaitedWeights:
    """The parameters and buffers of a model that no file has brought yet; the model's forward raises while there are any."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = dict.fromkeys(names)
        self._handle: Any = None

    def watch(self, model: nn.Module) -> None:
        """Let the forward of `model` raise until all have arrived."""
        if self.names:
            self._handle = model.register_forward_pre_hook(self._check, prepend=True)

    def _check(self, module: nn.Module, args: Any) -> None:
        raise ModelError(
            f"'{next(iter(self.names))}' and {len(self.names) - 1} more have no values yet, because the model was built on the "
            "meta device; call onecopy.load_pretrained(engine, folder) or engine.load_checkpoint(folder) first"
        )

    def arrived(self, names: Iterable[str]) -> None:
        """These have values now."""
        for name in names:
            self.names.pop(name, None)
        if not self.names and self._handle is not None:
            self._handle.remove()
            self._handle = None


@contextmanager
def weights_in_reach(model: nn.Module) -> Iterator[AwaitedWeights]:
    """Inside, the engine may be built; gives what it will have to wait for. Collective.

    Raises:
        ModelError: a buffer of the meta device can be computed by nobody and is in no file.
    """
    awaited = AwaitedWeights()
    suspend_construction()
    try:
        buffers = materialise_buffers(model)
        with shapes_revealed(model) as parameters:
            yield awaited
    finally:
        resume_construction()
    awaited.arrived(list(awaited.names))
    awaited.names.update(dict.fromkeys([*parameters, *buffers]))
    awaited.watch(model)
