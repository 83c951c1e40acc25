"""Optimizer state by parameter: taken from an optimizer before its parameters are sharded, and laid into the runs."""

from typing import Any

import torch
from torch import nn

States = dict[str, dict[str, Any]]


def take_states(optimizer: torch.optim.Optimizer, model: nn.Module) -> States:
    """The optimizer's state by qualified parameter name; the optimizer is left without any."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {
        names[id(parameter)]: dict(state)
        for parameter, state in optimizer.state.items()
        if state and id(parameter) in names
    }
    optimizer.state.clear()
    return states
