"""Building models on a device or without memory."""

from . import OnDevice

__all__ = ["OnDevice"]
