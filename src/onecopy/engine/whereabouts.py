"""Where a run is: hooks that tell the ledger which module, stretch and phase the next birth belongs to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onecopy.observe.ledger import Ledger
from onecopy.sharding.outputs import map_tensors


class Whereabouts:
    """Keeps a ledger's `module`, `stretch` and `phase` while its model runs; `close` takes the hooks off."""

    def __init__(self, model: nn.Module, ledger: Ledger) -> None:
        self.ledger = ledger
        self.blocks = repeated_blocks(model)
        self._last = next(reversed(self.blocks.values()), None)
        self._handles: list[Any] = []
        self._stack: list[str] = []
        for name, module in model.named_modules():
            if name:
                self._handles.append(module.register_forward_pre_hook(self._entering(name, module), prepend=True))
                self._handles.append(module.register_forward_hook(self._leaving(name, module), always_call=True))

    def _entering(self, name: str, module: nn.Module) -> Any:
        is_block = name in self.blocks

        def enter(*_: Any) -> None:
            ledger = self.ledger
            if torch._C._current_graph_task_id() != -1:
                ledger.phase = "recompute"
            elif not self._stack:
                ledger.stretch = "before" if ledger.stretch == "before" else ledger.stretch
            if is_block:
                ledger.stretch = "block"
            self._stack.append(ledger.module)
            ledger.module = name

        return enter

    def _leaving(self, name: str, module: nn.Module) -> Any:
        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            ledger = self.ledger
            ledger.module = self._stack.pop() if self._stack else ""
            if torch._C._current_graph_task_id() != -1:
                if not self._stack:
                    ledger.phase = "backward"
                return None
            if module is self._last:
                ledger.stretch = "after"
            if name in self.blocks and torch.is_grad_enabled():
                map_tensors(output, self._backward_begins(name))
            return None

        return leave

    def _backward_begins(self, name: str) -> Any:
        def begins(_: torch.Tensor) -> None:
            if self.ledger.phase != "recompute":
                self.ledger.phase = "backward"
            self.ledger.stretch = "block"
            self.ledger.module = name

        def hook(output: torch.Tensor) -> torch.Tensor:
            if output.requires_grad:
                output.register_hook(begins)
            return output

        return hook

    def begin(self, phase: str) -> None:
        """A forward, backward or step of the whole model begins."""
        self._stack.clear()
        self.ledger.phase = phase
        self.ledger.module = ""
        if phase == "forward":
            self.ledger.stretch = "before"
        elif phase == "step":
            self.ledger.stretch = "step"

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The children of the outermost lists of like modules, by name, in order."""
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len(module) >= 2
            and len({type(child) for child in module}) == 1
        ):
            inside = (*inside, f"{name}." if name else "")
            found |= {f"{name}.{local}" if name else local: child for local, child in module.named_children()}
    return found


def block_of(module: str) -> str:
    """The name of the repeated block that a module's qualified name lies in, "" for one outside all blocks."""
    parts = module.split(".")
    return next((".".join(parts[: place + 1]) for place, part in enumerate(parts) if part.isdigit()), "")


def adopt_state(engine: Any, ledger: Ledger) -> None:
    """Name the training state that lives now."""
    flats = [flat for unit in engine.units for flat in unit.buffers]
    managed = {id(parameter) for flat in flats for parameter in flat.parameters}
    present: Any = lambda *values: [value for value in values if value is not None]  # noqa: E731
    for flat in flats:
        ledger.adopt(present(flat.master), "masters")
    for flat in flats:
        ledger.adopt(present(flat.whole, flat.shard), "parameters")
    ledger.adopt((p for p in engine.module.parameters() if id(p) not in managed), "parameters")
    ledger.adopt(engine.module.buffers(), "parameters")
    ledger.adopt((slot.memory for slot in engine.runtime.slots.slots), "slots")
    for slot in engine.gradients._slots:
        ledger.adopt(present(slot.memory, slot.scratch), "gradients")
    for gradient in engine.gradients.all:
        ledger.adopt(present(gradient.shard, gradient.whole), "gradients")
    ledger.adopt(engine.communicator.sum.memory, "gradients")
    if engine.optimizer is not None:
        for state in engine.optimizer.state.values():
            ledger.adopt((value for value in state.values() if isinstance(value, torch.Tensor)), "moments")


def adopt_state_before_steps(engine: Any, ledger: Ledger) -> Any:
    """Name the training state whenever an optimizer steps: gradients that arrive and go inside `engine.step` have no other moment.

    Returns:
        a handle whose `remove` ends it.
    """
    return register_optimizer_step_pre_hook(lambda *_: adopt_state(engine, ledger))
