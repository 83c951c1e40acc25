"""FusedLamb by its place in DeepSpeed's tree."""

from . import FusedLamb

__all__ = ["FusedLamb"]
