"""DeepSpeedCPULion by its place in DeepSpeed's tree."""

from . import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
