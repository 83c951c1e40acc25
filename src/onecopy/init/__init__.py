"""Whole parameters outside a forward: read them, edit them, let the masters follow."""

from onecopy.init.gathered import GatheredParameters

__all__ = ["GatheredParameters"]
