"""A kind of optimizer that onecopy never makes, for `isinstance`: bf16 trains with the optimizer of its stage."""

from onecopy.integrations.deepspeed.optimizers import NoOptimizer as BF16_Optimizer

__all__ = ["BF16_Optimizer"]
