"""The optimizer of stage 0 over 16-bit parameters, for `isinstance`."""

from onecopy.integrations.deepspeed.optimizers import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
