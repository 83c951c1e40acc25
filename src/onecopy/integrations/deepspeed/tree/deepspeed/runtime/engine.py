"""The engine under DeepSpeed's name."""

from onecopy.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
