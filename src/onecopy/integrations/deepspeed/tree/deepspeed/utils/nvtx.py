"""Names in profiles."""

from . import instrument_w_nvtx

__all__ = ["instrument_w_nvtx"]
