"""The engine part that DeepSpeed makes of a stage-3 model without an optimizer."""

from . import DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
