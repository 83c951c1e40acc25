"""Versions of torch."""

import torch


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch's major.minor version lies within the bounds, which are numbers such as 2.3."""
    found = _parts(".".join(torch.__version__.split(".")[:2]))
    low, high = (None if bound is None else _parts(str(bound)) for bound in (min_version, max_version))
    return (low is None or found >= low) and (high is None or found <= high)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


__all__ = ["required_torch_version"]
