"""Rehearse training steps under the ledger: the same few lines on fake tensors and on real ones, so both can be compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import onecopy
from onecopy.engine.whereabouts import Whereabouts, adopt_state, adopt_state_before_steps
from onecopy.observe.ledger import Ledger
from onecopy.plan.tape import RecordingCollective, Tape
from onecopy.plan.virtual import communicator_here


@dataclass(frozen=True)
class Subject:
    """A model to plan for.

    Attributes:
        build: makes the module.
        batch: (micro-batch, sequence length) to the keyword arguments of forward.
        loss: the scalar loss in what forward returned.
        sequence: its usual sequence length in tokens; 0 where it has none.
        source: what the user named it by.
        layers: its repeated blocks; 0 where they are not known.
        shrink: the same model with fewer blocks, where that can be built.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Any]]
    loss: Callable[[Any], torch.Tensor]
    sequence: int = 0
    source: str = ""
    layers: int = 0
    shrink: Callable[[int], Subject] | None = None


@dataclass
class Window:
    """One optimizer step in the ledger's events: its bounds, its peak and what was sent."""

    start: int
    stop: int
    peak: int
    peak_at: int
    sent: dict[str, Any] = field(default_factory=dict)


@dataclass
class Rehearsal:
    """What a rehearsal left: the ledger and the bounds of each window in it.

    Attributes:
        model_bytes: of the whole model as built, before it was sharded.
        numel: its parameters' elements.
    """

    ledger: Ledger
    windows: list[Window]
    model_bytes: int
    numel: int
    resting: dict[str, int]
    units: list[tuple[str, int]]
    memory: dict[str, int]

    @property
    def peak(self) -> int:
        """Bytes, in the last window: the first has no optimizer state yet."""
        return self.windows[-1].peak

    def at_peak(self) -> dict[str, int]:
        return self.ledger.by_category(self.windows[-1].peak_at)

    def holders(self, most: int = 12) -> list[tuple[str, str, int]]:
        return self.ledger.holders(self.windows[-1].peak_at, most)

    def timeline(self, points: int = 400) -> list[tuple[int, dict[str, int]]]:
        last = self.windows[-1]
        return self.ledger.timeline(last.start, last.stop, points)


def rehearse(
    subject: Subject,
    config: Any,
    micro_batch: int,
    sequence: int,
    windows: int = 2,
    warm: bool = False,
    tape: Tape | None = None,
    around: Callable[[Any, Ledger, Whereabouts], Any] | None = None,
    ledger: Ledger | None = None,
) -> Rehearsal:
    """Build, initialize and train `windows` optimizer steps under a ledger. Collective in a real world.

    Args:
        warm: let optimizer state be there from the start, by a step on gradients that no forward made; one window then
            stands for all later ones.
        tape: records the last window's operators and transfers.
        around: called with (engine, ledger, whereabouts) once the engine stands.
    """
    ledger = ledger or Ledger()
    with ledger, ExitStack() as hooks:  # they go where the model fails too, and so does the engine
        model = subject.build()
        model.train()
        model_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        numel = sum(p.numel() for p in model.parameters())
        whereabouts = Whereabouts(model, ledger)
        hooks.callback(whereabouts.close)
        engine, *_ = onecopy.initialize(model=model, config=config, communicator=communicator_here())
        hooks.callback(_end, engine, ledger)
        adopt_state(engine, ledger)
        hooks.callback(adopt_state_before_steps(engine, ledger).remove)
        if around is not None:
            around(engine, ledger, whereabouts)
        batch = _as_computed(subject.batch(micro_batch, sequence), engine.configuration.compute_dtype)
        ledger.adopt((value for value in batch.values()), "batch")
        if warm:
            whereabouts.begin("step")
            _warm(engine)
            adopt_state(engine, ledger)
        if tape is not None:
            tape.where = ledger
            ledger.operators = tape
            assert isinstance(engine.communicator, RecordingCollective)
            engine.communicator.tape = tape
        done = []
        for number in range(windows):
            if tape is not None:
                tape.recording = number == windows - 1
            done.append(_window(engine, ledger, whereabouts, subject, batch))
        memory = engine.memory()
        ledger.label()
        resting = ledger.by_category(len(ledger.events))
        units = [(unit.name, sum(flat.numel for flat in unit.buffers)) for unit in engine.units]
    return Rehearsal(ledger, done, model_bytes, numel, resting, units, memory)


def _as_computed(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Floating-point inputs in the type that the model computes in, as its user must give them."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _end(engine: Any, ledger: Ledger) -> None:
    """What is examined is over, at its end or where it failed: nothing of the engine stays in this process."""
    ledger.stop()
    ledger.operators = None
    engine.destroy()


def _window(engine: Any, ledger: Ledger, whereabouts: Whereabouts, subject: Subject, batch: dict[str, Any]) -> Window:
    start = len(ledger.events)
    ledger.reset_peak()
    for micro in range(engine.gradient_accumulation_steps()):
        ledger.mark(f"forward {micro}")
        whereabouts.begin("forward")
        loss = subject.loss(engine(**batch))
        ledger.mark(f"backward {micro}")
        whereabouts.begin("backward")
        ledger.stretch = "after"
        engine.backward(loss)
        del loss
        adopt_state(engine, ledger)
        ledger.mark("step")
        whereabouts.begin("step")
        engine.step()
    adopt_state(engine, ledger)
    return Window(start, len(ledger.events), ledger.peak, ledger.peak_at, engine.communication())


@torch.no_grad()
def _warm(engine: Any) -> None:
    """Step once on gradients of zero, which makes the optimizer's state."""
    engine.gradients.begin_backward(deferring=False)
    for gradient in list(engine.gradients.all):
        for index, place in enumerate(gradient.flat.layout.ranges):
            engine.gradients.receive(gradient, index, torch.zeros((), dtype=gradient.wire_dtype).expand(place.shape))
    engine.gradients.end_backward()
    engine.runtime.micro_batches = engine.window.steps
    engine.window.forced = True
    engine.step()
    engine.window.forced = None
    engine.window.micro_steps = 0
