"""A kind of optimizer that onecopy never makes, for `isinstance`."""

from onecopy.integrations.deepspeed.optimizers import NoOptimizer as FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
