"""Counting what a graph keeps disturbs no forward, whatever it did with its own graphs and whatever tensors it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onecopy.observe.activations import saved_nbytes


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(2 * x)
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        assert len(context.saved_tensors) == 1
        return 2 * gradient


def test_what_an_earlier_backward_has_given_up_counts_nothing() -> None:
    x = torch.ones(4, requires_grad=True)
    y = Doubled.apply(x)
    assert saved_nbytes([y.exp()], ()) == 2 * x.nbytes
    torch.autograd.grad(y.sum(), x)
    assert saved_nbytes([y.exp()], ()) == x.nbytes


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_by_their_indices_and_values(layout: torch.layout) -> None:
    """A graph network keeps its adjacency matrix."""
    sparse = torch.eye(4).to_sparse(layout=layout)
    weight = torch.nn.Parameter(torch.ones(4, 2))
    least = 2 * 4 * 8 if layout == torch.sparse_coo else (5 + 4) * 8  # indices; torch may give them more room
    found = saved_nbytes([sparse @ weight], (weight.untyped_storage()._cdata,))
    assert least + 4 * 4 <= found <= 2 * least


def test_tensors_of_other_kinds_do_not_matter() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    assert saved_nbytes([torch.relu(x.to_mkldnn()).to_dense().exp()], ()) >= x.nbytes
