"""The logger, and messages of chosen ranks."""

import functools
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onecopy.observe.log import current_rank, logger

# Code says logging.getLogger("DeepSpeed") to quieten or to capture what the library says.
logging.Logger.manager.loggerDict["DeepSpeed"] = logger

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def _is_chosen(ranks: Iterable[int] | None) -> bool:
    chosen = list(ranks or [])
    return not chosen or -1 in chosen or current_rank() in chosen


def get_dist_msg(message: str, ranks: Iterable[int] | None = None) -> str | None:
    """The message with this rank's number; None on ranks that are not asked for."""
    return f"[Rank {current_rank()}] {message}" if _is_chosen(ranks) else None


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; on all of them without `ranks` or with -1 among them."""
    if _is_chosen(ranks):
        logger.log(level, "[Rank %d] %s", current_rank(), message)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, the same message once a process."""
    _once(message, None if ranks is None else tuple(sorted(ranks)), level)


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """The same warning once a process."""
    logger.warning(*args, **kwargs)


logger.warning_once = warning_once  # type: ignore[attr-defined]


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    """Print on the given ranks."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text)


def print_json_dist(message: dict[str, Any], ranks: Iterable[int] | None = None, path: Any = None) -> None:
    """Write the dictionary with this rank's number as JSON, on the given ranks."""
    if _is_chosen(ranks):
        message["rank"] = current_rank()
        Path(path).write_text(json.dumps(message))


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of a namespace."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), getattr(args, key))


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level; ValueError for none of debug, info, warning, error, critical."""
    name = log_level_str.lower()
    if name not in log_levels:
        raise ValueError(f"{log_level_str!r} is no log level; write one of {', '.join(log_levels)}")
    return int(log_levels[name])


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is the given one or a more talkative one."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


class LoggerFactory:
    """Makes loggers that write to standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        if name is None:
            raise ValueError("name for logger cannot be None")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            made.addHandler(logging.StreamHandler(sys.stdout))
        return made


__all__ = [
    "LoggerFactory",
    "get_current_level",
    "get_dist_msg",
    "get_log_level_from_string",
    "log_dist",
    "log_dist_once",
    "log_levels",
    "logger",
    "print_configuration",
    "print_dist",
    "print_json_dist",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]
