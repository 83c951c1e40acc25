"""Optimizer state by parameter: taken from an optimizer before its parameters are sharded, and laid into the runs."""

from typing import Any

import torch
from torch import nn

States = dict[str, dict[str, Any]]


_NUMBERS = frozenset({"step", "mu", "mu_product", "eta"})  # of torch's optimizers: one number a parameter


def take_states(optimizer: torch.optim.Optimizer, model: nn.Module) -> States:
    """The optimizer's state by qualified parameter name; the optimizer is left without any.

    A parameter's one number (its step count) has no dimension. What has one element for each of the parameter's has at
    least one, also where the parameter itself has none.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: States = {}
    for parameter, state in optimizer.state.items():
        if state and id(parameter) in names:
            scalar = parameter.dim() == 0
            states[names[id(parameter)]] = {
                key: value.reshape(1) if scalar and _has_elements(key, value) else value for key, value in state.items()
            }
    optimizer.state.clear()
    return states


def _has_elements(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and key not in _NUMBERS
