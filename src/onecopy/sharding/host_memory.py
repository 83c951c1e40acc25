"""Let freed host memory go back to the system while a model is built.

The C library keeps what is freed between blocks that stay, and torch's aligned allocations seldom fit such a hole again: a
model that is built and sharded piece by piece would leave as much unused memory behind as it has weights.
"""

from __future__ import annotations

import ctypes

_EVERY = 16 << 20  # bytes freed between two calls; one call takes about a millisecond
_freed = 0


def freed(nbytes: int) -> None:
    """So many bytes of host memory were freed just now. Not collective."""
    global _freed
    _freed += nbytes
    if _freed >= _EVERY:
        give_back()


def give_back() -> None:
    """Return all freed memory to the system, where the C library knows how."""
    global _freed
    _freed = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
