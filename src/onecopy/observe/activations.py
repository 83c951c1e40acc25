"""How many bytes of activations a forward leaves for its backward, counted as autograd saves them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch


class SavedActivations:
    """Counts one forward's saved tensors by storage, each once; weights are not activations.

    Attributes:
        nbytes: what the last counted forward saved, None before the first.
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None

    @contextmanager
    def count(self, weights: Collection[int]) -> Iterator[None]:
        """Count the forward inside; `weights` are the storages (by `_cdata`) to leave out."""
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                seen[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.nbytes = sum(seen.values())
