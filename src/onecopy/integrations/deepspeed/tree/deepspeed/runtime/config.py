"""The configuration, and the error of one that cannot be honoured."""

from onecopy.errors import ConfigError as DeepSpeedConfigError
from onecopy.integrations.deepspeed.configuration import DeepSpeedConfig

from .zero.config import ZeroStageEnum

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "ZeroStageEnum"]
