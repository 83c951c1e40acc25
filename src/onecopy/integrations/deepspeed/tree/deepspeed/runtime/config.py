"""The error of a configuration that cannot be honoured."""

from onecopy.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
