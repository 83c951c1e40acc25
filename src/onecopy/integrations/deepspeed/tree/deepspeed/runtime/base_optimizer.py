"""What `initialize` returns as the optimizer, under the names of DeepSpeed's base classes."""

from onecopy.integrations.deepspeed.optimizers import ZeROOptimizer
from onecopy.optim.wrapper import ShardedOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
