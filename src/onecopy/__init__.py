"""onecopy: one copy of every training state across all your GPUs (ZeRO stages 0-3 for PyTorch)."""

from onecopy import utils, zero
from onecopy.engine import Engine, initialize

__version__ = "0.1.0"

__all__ = ["Engine", "__version__", "initialize", "utils", "zero"]
