"""What `initialize` returns as the optimizer, under the names of DeepSpeed's base classes."""

from onecopy.optim.wrapper import ShardedOptimizer as DeepSpeedOptimizer

ZeROOptimizer = DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
