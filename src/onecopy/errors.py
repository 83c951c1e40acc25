"""Every error the user can meet, by the place it comes from; each message names the place, the value and the fix."""


class OneCopyError(RuntimeError):
    """Base of all errors raised by onecopy."""


class ConfigError(OneCopyError, ValueError, AssertionError):
    """The configuration cannot be honoured; the message names the key path, the value and the fix.

    It is an AssertionError too because DeepSpeed's checks of batch sizes raise that, and code written for it catches it.
    """


class ModelError(OneCopyError, ValueError):
    """The model, its parameters or its optimizer cannot be sharded as given."""


class ReleasedParameterError(OneCopyError):
    """A parameter whose values are not on this rank now was read outside a forward or a gathering context."""


class CommunicationError(OneCopyError):
    """Ranks disagree about, or did not take part in, a collective call."""


class CheckpointError(OneCopyError, ValueError, AssertionError):
    """A checkpoint cannot be written or read as asked.

    It is what DeepSpeed raises too: a ValueError for a tag that is no name, an AssertionError for one that is not there.
    """


class PlanError(OneCopyError, ValueError):
    """A plan cannot be made as asked: an unknown model or GPU, a size out of range, a model that reads values."""
