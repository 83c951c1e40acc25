"""Counting what a model computes."""

from . import flops_profiler

__all__ = ["flops_profiler"]
