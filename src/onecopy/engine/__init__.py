"""The engine: the contract users know, built from the rooms below it."""

from onecopy.engine.engine import Engine
from onecopy.engine.start import initialize

__all__ = ["Engine", "initialize"]
