"""The class of accelerators by its place in DeepSpeed's tree."""

from . import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
