"""Helpers around checkpoints."""

from . import utils

__all__ = ["utils"]
