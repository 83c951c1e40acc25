"""Names of DeepSpeed that onecopy does not offer: they exist, and say in one sentence why not and what to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from onecopy.errors import OneCopyError

TORCHRUN = "start ranks with `onecopy run` or torchrun"


class NotOffered(OneCopyError, NotImplementedError):
    """A part of DeepSpeed's interface that onecopy does not have; the message names the alternative."""


def refused_function(name: str, sentence: str) -> Callable[..., NoReturn]:
    """A function called `name` that raises `NotOffered` with the sentence when it is called."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotOffered(f"deepspeed.{name} is not offered by onecopy: {sentence}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not offered: {sentence}."
    return refuse


def refused_class(name: str, sentence: str) -> Any:
    """A class called `name`, for `isinstance` and `except`, whose construction raises `NotOffered`."""
    return type(
        name.rpartition(".")[2],
        (),
        {"__init__": refused_function(name, sentence), "__doc__": f"Not offered: {sentence}.", "__slots__": ()},
    )
