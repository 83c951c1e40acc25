"""What code asks about torch.compile."""

from typing import Any

import torch


def is_compile_supported() -> bool:
    return True


def disable(func: Any) -> Any:
    """Keep a function out of torch.compile's graphs."""
    return torch.compiler.disable(func)


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


__all__ = ["disable", "is_compile_supported", "is_compiling"]
