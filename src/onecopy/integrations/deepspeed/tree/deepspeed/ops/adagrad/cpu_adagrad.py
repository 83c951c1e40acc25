"""DeepSpeedCPUAdagrad by its place in DeepSpeed's tree."""

from . import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
