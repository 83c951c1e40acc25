"""Flops of a model's forward, by module; the configuration's `flops_profiler` block has the engine count a step by itself."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from onecopy.observe.flops import FlopProfile, parameters_of
from onecopy.observe.flops_text import (
    aggregated_lines,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    profile_text,
    write_profile,
)


class FlopsProfiler:
    """Profiles the forwards of a model between `start_profile` and `stop_profile`; the numbers last until `end_profile`.

    Args:
        ds_engine: accepted; the model is what is counted.
        recompute_fwd_factor: how many further forwards activation checkpointing recomputes; the totals count them.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._profile = FlopProfile(model)

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        self._profile.start(ignore_list or ())
        self.started = True

    def stop_profile(self) -> None:
        self._profile.stop()

    def reset_profile(self) -> None:
        self._profile.reset()

    def end_profile(self) -> None:
        if self.started:
            self._profile.reset()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        flops = self._profile.total.flops * (1 + self.recompute_fwd_factor)
        return number_to_string(flops) if as_string else (int(flops) if flops == int(flops) else flops)

    def get_total_macs(self, as_string: bool = False) -> Any:
        macs = self._profile.total.macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds."""
        duration = self._profile.total.duration
        return duration_to_string(duration) if as_string else duration

    def get_total_params(self, as_string: bool = False) -> Any:
        parameters = parameters_of(self.model)
        return params_to_string(parameters) if as_string else parameters

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile, or write it into a file."""
        if not self.started:
            return
        text = profile_text(self._profile, profile_step, module_depth, top_modules, detailed)
        if output_file is None:
            print(text)
        else:
            write_profile(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the largest modules of each depth."""
        print("\n".join(aggregated_lines(self._profile, module_depth, top_modules)))


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(flops, multiply-accumulates, parameters) of one call of a model, as numbers or as strings.

    Args:
        input_shape: of the one tensor to call it with, batch included; in its place `args` and `kwargs` may be given.
        mode: "forward", or "generate" to call that method.
    """
    assert isinstance(model, nn.Module), "model must be a PyTorch module"
    inputs = list(args)
    if input_shape is not None:
        assert type(input_shape) is tuple and len(input_shape) >= 1, "input_shape must be a tuple of at least one size"
        like = next(model.parameters(), torch.empty(()))
        inputs = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    assert inputs or kwargs, "args, kwargs or input_shape must be given"
    if mode not in ("forward", "generate"):
        raise NotImplementedError(f"mode is {mode!r}; write 'forward' or 'generate'")
    call = model if mode == "forward" else model.generate
    model.eval()
    for _ in range(warm_up):
        call(*inputs, **(kwargs or {}))  # type: ignore[operator]
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_modules)
    call(*inputs, **(kwargs or {}))  # type: ignore[operator]
    profiler.stop_profile()
    found = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    return found


__all__ = [
    "FlopsProfiler",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
