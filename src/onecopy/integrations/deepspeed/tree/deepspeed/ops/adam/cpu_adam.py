"""DeepSpeedCPUAdam by its place in DeepSpeed's tree."""

from . import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
