"""FusedLion by its place in DeepSpeed's tree."""

from . import FusedLion

__all__ = ["FusedLion"]
