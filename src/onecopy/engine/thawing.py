"""Frozen parameters that begin to be trained: they get masters, gradients and optimizer state at the start of a window.

Whether a parameter requires gradients is looked at before the first forward of every window. One that was frozen at
`initialize` and was given to the optimizer is trained from then on:

sharded weights   lie in flat buffers of their own kind; the shard becomes the master, nothing is communicated
whole weights     move into new flat buffers, a unit that is always resident

Moments appear with the first step, as always. What a thawed parameter shares a flat buffer with and is still frozen
has no gradient, and is left alone by every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from onecopy.engine.dtypes import compute_dtype_rule
from onecopy.errors import ModelError
from onecopy.optim.across_shards import AcrossShards
from onecopy.sharding import BuildRules, FlatBuffer, Unit, build_unfrozen
from onecopy.sharding.parameter import ParameterHome

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

Named = tuple[str, nn.Parameter]


class Thawing:
    """Watches the parameters of one engine that are frozen.

    Attributes:
        frozen: those not trained so far, by name.
    """

    def __init__(self, engine: Engine, group_of: dict[int, int]) -> None:
        self.engine = engine
        self.group_of = group_of
        self.frozen: list[Named] = [(n, p) for n, p in engine.module.named_parameters() if not p.requires_grad]
        self._count = 0

    def may_follow(self) -> list[str]:
        """Names of the frozen parameters that the optimizer was given, to be trained later."""
        return [name for name, parameter in self.frozen if id(parameter) in self.group_of]

    def look(self) -> None:
        """Train what has begun to require gradients. Collective when there is something, free otherwise.

        Raises:
            ModelError: it was not given to the optimizer, or ranks have unfrozen different parameters.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a parameter whose weights are elsewhere may be asked too
            if not any(parameter.requires_grad for _, parameter in self.frozen):
                return
            thawed = [(name, parameter) for name, parameter in self.frozen if parameter.requires_grad]
        self._check(thawed)
        self.frozen = [(n, p) for n, p in self.frozen if not any(p is other for _, other in thawed)]
        sharded = [(p, home) for _, p in thawed if (home := self._home(p)) is not None]
        whole = [(n, p) for n, p in thawed if self._home(p) is None and p.numel()]
        for _, parameter in thawed:
            parameter.grad = None  # of a backward before this window, which no step took
        new = self._wake(sharded)
        if whole:
            unit = self._new_unit(whole)
            new += unit.buffers
        self._include(new)
        for parameter, home in sharded:
            flat = next(f for f in home.unit.buffers if any(parameter is member for member in f.parameters))
            self.engine.runtime.receive_gradient(flat, home.index)
        self.engine._drop_gradients_of([p for _, p in thawed if not p.numel()])

    def _check(self, thawed: list[Named]) -> None:
        everyone = self.engine.communicator.exchange([name for name, _ in thawed], "parameters that were unfrozen")
        for rank, names in enumerate(everyone):
            if names != everyone[0]:
                odd = sorted(set(names) ^ set(everyone[0]))[0]
                raise ModelError(
                    f"parameter '{odd}' has requires_grad=True now on some ranks only (compare ranks 0 and {rank}); "
                    "freeze and unfreeze the same parameters on every rank"
                )
        for name, parameter in thawed:
            if id(parameter) not in self.group_of:
                raise ModelError(
                    f"parameter '{name}' was frozen at initialize and has requires_grad=True now, but it was not given to the "
                    "optimizer; pass frozen parameters that will be trained later in model_parameters (or in the optimizer) too"
                )

    @staticmethod
    def _home(parameter: nn.Parameter) -> ParameterHome | None:
        return getattr(parameter, "_onecopy", None)

    def _wake(self, sharded: list[tuple[nn.Parameter, ParameterHome]]) -> list[FlatBuffer]:
        """Let sharded flat buffers with one of these parameters be trained; those that were not before."""
        woken = []
        for parameter, home in sharded:
            for flat in home.unit.buffers:
                if not flat.trainable and any(parameter is member for member in flat.parameters):
                    flat.train()
                    woken.append(flat)
        return woken

    def _new_unit(self, whole: list[Named]) -> Unit:
        engine = self.engine
        zero = engine.configuration.zero
        rules = BuildRules(
            engine.placement,
            compute_dtype_rule(engine.module, engine.configuration),
            self.group_of,
            set(),
            min(zero.reduce_bucket_size, zero.allgather_bucket_size or zero.reduce_bucket_size),
        )
        self._count += 1
        last = max((flat.key for unit in engine.units for flat in unit.buffers), default=0)
        unit = build_unfrozen(f"(unfrozen {self._count})", whole, rules, engine.communicator, last)
        engine.units = [*engine.units, unit]
        return unit

    def _include(self, flats: list[FlatBuffer]) -> None:
        """Make gradients, runs and hooks of newly trained flat buffers, the same on every rank."""
        engine = self.engine
        optimizer = engine.basic_optimizer
        assert optimizer is not None
        engine.gradients.include(flats, engine._reduce_order())
        engine.masters.include(flats)
        if isinstance(optimizer, AcrossShards):
            optimizer.bind(engine.masters, engine.communicator)
        engine.optimizer_step.look_at_gradients()
        engine.runtime.include(engine.units)
