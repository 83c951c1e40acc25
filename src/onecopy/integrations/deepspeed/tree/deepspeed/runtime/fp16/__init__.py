"""Loss scales, and the names of 16-bit optimizers."""

from . import fused_optimizer, loss_scaler, unfused_optimizer

__all__ = ["fused_optimizer", "loss_scaler", "unfused_optimizer"]
