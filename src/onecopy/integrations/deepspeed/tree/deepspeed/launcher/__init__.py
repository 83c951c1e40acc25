"""DeepSpeed's launcher."""

from . import runner

__all__ = ["runner"]
