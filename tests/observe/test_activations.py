"""Counting what a graph keeps disturbs no forward, whatever it did with its own graphs."""

from __future__ import annotations

from typing import Any

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
