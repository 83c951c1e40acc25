"""The logger, and messages of chosen ranks."""

import logging
from collections.abc import Iterable

from onecopy.observe.log import current_rank, logger


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; on all of them without `ranks` or with -1 among them."""
    chosen = list(ranks or [])
    if not chosen or -1 in chosen or current_rank() in chosen:
        logger.log(level, "[Rank %d] %s", current_rank(), message)


__all__ = ["log_dist", "logger"]
