"""How many bytes of activations a forward leaves for its backward, read from the graph that autograd has built."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_COMPRESSED_ROWS, _COMPRESSED_COLUMNS = (
    ("crow_indices", "col_indices", "values"),
    ("ccol_indices", "row_indices", "values"),
)
_PARTS: dict[torch.layout, tuple[str, ...]] = {  # of tensors that have no storage themselves
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
    torch._mkldnn: (),  # type: ignore[attr-defined]  # its bytes cannot be asked for
}


def saved_nbytes(outputs: Iterable[torch.Tensor], weights: Collection[int]) -> int:
    """Bytes of all storages that the graph behind `outputs` keeps, each counted once.

    Nothing is unpacked, so what a checkpointed block will compute again stays uncomputed and counts nothing. Weights are
    no activations.

    Args:
        weights: storages (by `_cdata`) to leave out: what views of weights lie in.
    """
    nbytes: dict[int, int] = {}
    seen: set[Any] = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in _saved_by(node):
            if torch._C._functorch.is_functorch_wrapped_tensor(
                tensor
            ):  # inside torch.func's transforms: it has no storage
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                nbytes[storage._cdata] = storage.nbytes()
        waiting += [earlier for earlier, _ in node.next_functions]
    return sum(nbytes.values())


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:  # given up already, by a gradient that the forward itself has taken
            continue
        for saved in value if isinstance(value, tuple | list) else (value,):
            held = pytree.tree_leaves(getattr(saved, "data", None))  # what hooks have made of the tensor
            for tensor in held:
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
                    parts = _PARTS.get(tensor.layout)
                    yield from [tensor] if parts is None else [getattr(tensor, part)() for part in parts]
