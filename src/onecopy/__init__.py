"""onecopy: one copy of every training state across all your GPUs (ZeRO stages 0-3 for PyTorch)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onecopy import checkpointing, utils, zero
    from onecopy.engine import Engine, initialize

__version__ = "0.1.0"

__all__ = ["Engine", "__version__", "checkpointing", "initialize", "utils", "zero"]


def __getattr__(name: str) -> Any:
    """The engine is imported when it is asked for: the command line's help and `onecopy check` need no torch."""
    if name in ("Engine", "initialize"):
        return getattr(import_module("onecopy.engine"), name)
    if name in ("checkpointing", "utils", "zero"):
        return import_module(f"onecopy.{name}")
    raise AttributeError(f"module 'onecopy' has no attribute '{name}'")
