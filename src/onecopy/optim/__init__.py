"""Optimizer and schedule registries, loss scale, and the step on sharded master weights."""

from onecopy.optim.lamb import Lamb
from onecopy.optim.lion import Lion
from onecopy.optim.muon import Muon

__all__ = ["Lamb", "Lion", "Muon"]
