"""FusedAdam by its place in DeepSpeed's tree."""

from . import FusedAdam

__all__ = ["FusedAdam"]
