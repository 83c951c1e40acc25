"""The random generators of one rank: Python's, numpy's, torch's and the device's, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def file_name(rank: int) -> str:
    """The file of a rank's own state."""
    return f"rank_{rank:05d}.pt"


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """What the engine's `generators` gave, in types that load safely."""
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpys = [str(kind), torch.tensor(keys.astype("int64")), int(position), int(has_gauss), float(gauss)]
    return {**state, "numpy": numpys}


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators; one that the state lacks (the device's, on another kind of device) stays as it is."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device.type).set_rng_state(state["device"], device)
