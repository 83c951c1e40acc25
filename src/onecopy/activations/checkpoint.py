"""Call a function, keep only its inputs, and call it again in backward: torch's non-reentrant checkpoint, with storage.

The inputs are what torch saves while `saved_tensors_hooks` of ours are the innermost ones; inside the function torch's
own take over. All tensors, those in keywords and in nested lists, tuples and dictionaries too, are given to torch one
by one, so that every one of them is stored as configured and its device's random state is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from onecopy.activations.profile import synchronize
from onecopy.activations.random_states import TRACKER
from onecopy.activations.settings import Settings, current


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose inner results are computed again when backward needs them.

    Random states are as they were. Arguments may be anything; tensors keep their values. Where the inputs are
    partitioned over model-parallel ranks it is collective over these ranks, in forward and in backward.
    """
    return call(function, args, kwargs, {})


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """`checkpoint` with further `options` of torch's."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler decides where things wait
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    settings = current()
    tensors: list[torch.Tensor] = []
    run = _Run(function, args, kwargs, _take_apart((args, kwargs), tensors), settings)
    with _stored(settings, tensors):
        return torch_checkpoint(run, *tensors, use_reentrant=False, **options)


def _stored(settings: Settings, tensors: list[torch.Tensor]) -> Any:
    """Hooks that put the inputs away; torch saves them in the order given, before the function begins."""
    if settings.storage.idle:
        return nullcontext()
    storage = (
        settings.storage
    )  # not `settings`: what was stored here comes back from here, whatever is configured later
    saved: Iterator[int] = iter(range(len(tensors) + 1))
    return saved_tensors_hooks(lambda tensor: storage.put(tensor, next(saved, 0)), storage.get)


class _Run:
    """The function with its arguments taken apart: called once with the caller's own, then with what was stored."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, form: Any, settings: Settings) -> None:
        self.function = function
        self.form = form
        self.settings = settings
        self.own: tuple[Any, Any] | None = (args, kwargs)
        self.states = TRACKER.get_states() if TRACKER.states_ else None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        again = self.own is None
        if self.own is not None:
            # The caller's very containers, so that what the function adds to one is seen; in backward copies take
            # it, so that nothing is added twice.
            (args, kwargs), self.own = self.own, None
        else:
            args, kwargs = _put_together(self.form, iter(tensors))
        with self._measured(again), self._random_states(again):
            return self.function(*args, **kwargs)

    @contextmanager
    def _measured(self, again: bool) -> Iterator[None]:
        settings = self.settings
        wait = settings.block.synchronize_checkpoint_boundary
        if wait:
            synchronize()
        with settings.profile.call(again) if settings.profile is not None else nullcontext():
            yield
        if wait:
            synchronize()

    @contextmanager
    def _random_states(self, again: bool) -> Iterator[None]:
        """The named states as they were in forward; torch restores the current ones itself."""
        if not again or self.states is None:
            yield
            return
        before = TRACKER.get_states()
        TRACKER.set_states(self.states)
        try:
            yield
        finally:
            TRACKER.set_states(before)


class _Tensor:
    """Stands for the next tensor in a form."""


_TENSOR = _Tensor()


def _take_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with its tensors taken out into `tensors`, in order; objects of other classes stay whole."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    if type(value) is dict:
        return {key: _take_apart(item, tensors) for key, item in value.items()}
    if type(value) is list:
        return [_take_apart(item, tensors) for item in value]
    if _is_tuple(value):
        items = [_take_apart(item, tensors) for item in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)
    return value


def _put_together(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if form is _TENSOR:
        return next(tensors)
    if type(form) is dict:
        return {key: _put_together(item, tensors) for key, item in form.items()}
    if type(form) is list:
        return [_put_together(item, tensors) for item in form]
    if _is_tuple(form):
        items = [_put_together(item, tensors) for item in form]
        return tuple(items) if type(form) is tuple else type(form)(*items)
    return form


def _is_tuple(value: Any) -> bool:
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))
