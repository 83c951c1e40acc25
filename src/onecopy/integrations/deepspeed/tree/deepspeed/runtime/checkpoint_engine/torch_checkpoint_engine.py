"""Files by `torch.save` and `torch.load`."""

from .checkpoint_engine import CheckpointEngine as TorchCheckpointEngine

__all__ = ["TorchCheckpointEngine"]
