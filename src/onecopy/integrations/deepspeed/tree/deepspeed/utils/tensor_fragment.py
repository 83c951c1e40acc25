"""State by parameter, by its place in DeepSpeed's tree."""

from .. import utils

__all__ = [name for name in utils.__all__ if name.startswith("safe_")]
globals().update({name: getattr(utils, name) for name in __all__})
