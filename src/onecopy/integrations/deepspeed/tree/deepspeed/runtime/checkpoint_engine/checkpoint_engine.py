"""What writes single files: `engine.checkpoint_engine`."""

from onecopy.engine.contract import PlainFiles


class CheckpointEngine(PlainFiles):
    """Files by `torch.save` and `torch.load`."""

    def __init__(self, config_params: object = None) -> None:
        self.name = "onecopy"


__all__ = ["CheckpointEngine"]
