"""onecopy: one copy of every training state across all your GPUs (ZeRO stages 0-3 for PyTorch)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onecopy import checkpointing, utils, zero
    from onecopy.engine import Engine, initialize
    from onecopy.inference import init_inference
    from onecopy.init import load_pretrained

__version__ = "0.1.0"

_HOMES = {
    "Engine": "onecopy.engine",
    "init_inference": "onecopy.inference",
    "initialize": "onecopy.engine",
    "load_pretrained": "onecopy.init",
}

__all__ = [
    "Engine",
    "__version__",
    "checkpointing",
    "init_inference",
    "initialize",
    "load_pretrained",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    """The engine is imported when it is asked for: the command line's help and `onecopy check` need no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in ("checkpointing", "optim", "utils", "zero"):
        return import_module(f"onecopy.{name}")
    raise AttributeError(f"module 'onecopy' has no attribute '{name}'")
