"""Torch's reductions by their place in DeepSpeed's tree."""

from torch.distributed import ReduceOp

__all__ = ["ReduceOp"]
