"""The life of units in a step: hooks gather before use, reduce after it, and give slots up in between.

        forward    pre-hook: gather, pin, start the next gather     post-hook: unpin, hook the outputs
        backward   output hook: gather again, unpin later units     gradient hook: copy into a gradient slot
        the end    a callback of autograd's engine: last reductions leave, everything is unpinned

Autograd runs nodes strictly from the latest created to the earliest (gradient accumulators at once), which is why the
first hook of an earlier call says that all later calls have finished.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from onecopy.comm import Communicator
from onecopy.errors import ModelError, ReleasedParameterError
from onecopy.sharding import messages
from onecopy.sharding.call import Call
from onecopy.sharding.flat_buffer import FlatBuffer
from onecopy.sharding.gathering import Gathering, Limits
from onecopy.sharding.gradients import FlatGradient, Gradients
from onecopy.sharding.order import Order
from onecopy.sharding.outputs import prepare_outputs
from onecopy.sharding.parameter import ParameterHome, refuse_loading
from onecopy.sharding.slots import Slot, SlotPool
from onecopy.sharding.transforms import inside_transform, prepare_for_transform
from onecopy.sharding.unit import Unit


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Runtime:
    """Hooks of one engine's model.

    Attributes:
        forwards_seen: numbers of the model's forwards whose backward has run in this window.
        micro_batches: backwards of the window that brought a new forward; several losses of one forward are one.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        slots: SlotPool,
        gradients: Gradients,
        communicator: Communicator,
        limits: Limits,
        phase: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model = model
        self.units = units
        self.slots = slots
        self.gradients = gradients
        self.communicator = communicator
        self.order = Order([unit for unit in units if not unit.resident])
        self.gathering = Gathering(slots, self.order, limits, phase or (lambda name: nullcontext()))
        self.residents = [unit for unit in units if unit.resident]
        self._unit_of = {flat.key: unit for unit in units for flat in unit.buffers}
        self._reuse_is_bounded = limits.reuse_elements < sum(unit.numel for unit in units)
        self.defer: Callable[[], bool] = lambda: False  # whether this backward's gradients stay whole
        self.scale_outputs: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        self.gradient_divisor: Callable[[], float] = lambda: 1.0
        self.before_window: Callable[[], None] = lambda: None  # before a forward of a window without gradients so far
        self.masters: Any = None  # the room above sets it, for reading state by parameter
        self.forwards_seen: set[int] = set()
        self.micro_batches = 0
        self.forward_number = 0
        self._sequence = 0
        self._stack: list[Call] = []
        self._inside = 0  # forwards of the engine under way
        self._task = -1
        self._touched_forwards: set[int] = set()
        self._earliest = math.inf  # number of a call that this backward has come to
        self._current: list[tuple[Unit, Slot]] = []  # pinned by the backward of the call under way
        self._held: list[tuple[Unit, Slot]] = []  # pinned from a forward at the root to the end of its backward
        self._handles: list[Any] = []
        self._attach()

    # ------------------------------------------------------------------------------------------------------ attaching
    def _attach(self) -> None:
        by_module = {id(unit.module): unit for unit in self.units if unit.module is not None}
        inside = {id(child) for unit in self.units if unit.module is not None for child in unit.module.modules()}
        for module in self.model.modules():
            unit = by_module.get(id(module))
            if unit is not None:
                self._hook(module, partial(self._unit_before, unit), self._unit_after)
            elif id(module) not in inside and type(module).forward is not nn.Module.forward:
                self._hook(module, self._outer_before, self._outer_after)
            if module._parameters:
                self._handles.append(module.register_load_state_dict_pre_hook(refuse_loading))
        for unit in self.units:
            for flat in unit.buffers:
                self._attach_parameters(unit, flat)

    def _hook(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after))

    def _attach_parameters(self, unit: Unit, flat: FlatBuffer) -> None:
        for index, (parameter, name) in enumerate(zip(flat.parameters, flat.names, strict=True)):
            parameter._onecopy = ParameterHome(name, self, unit, index)  # type: ignore[attr-defined]
            if flat.key in self.gradients.of:
                self.receive_gradient(flat, index)

    def receive_gradient(self, flat: FlatBuffer, index: int) -> None:
        """Take the gradients of one parameter of a trained flat buffer from autograd."""
        receiver = self._receiver(self.gradients.of[flat.key], index)
        self._handles.append(flat.parameters[index].register_post_accumulate_grad_hook(receiver))

    def include(self, units: list[Unit]) -> None:
        """Take in units that no module's forward announces, between windows; `units` are all of them now."""
        for unit in units:
            if unit not in self.units:
                assert unit.resident
                self.residents.append(unit)
                self._unit_of |= {flat.key: unit for flat in unit.buffers}
                for flat in unit.buffers:
                    self._attach_parameters(unit, flat)
        self.units = units

    def _receiver(self, gradient: FlatGradient, index: int) -> Callable[[torch.Tensor], None]:
        def receive(parameter: torch.Tensor) -> None:
            value, parameter.grad = parameter.grad, None
            if value is not None:
                self._enter_backward()
                if value.requires_grad:  # `create_graph`: the sums are no part of that graph
                    value = value.detach()
                self.gradients.receive(gradient, index, value)

        return receive

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runtime":
        raise ModelError(messages.copied())

    def __reduce__(self) -> Any:
        raise ModelError(messages.pickled("the model"))

    def detach(self) -> None:
        """Take every hook off. Not collective."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -------------------------------------------------------------------------------------------- forward, model's own
    @contextmanager
    def inside_forward(self) -> Iterator[None]:
        """Around the engine's forward: in it the model may call itself, as `self(batch)` in a Lightning training step does."""
        if not self._inside and self._stack and not in_backward():
            self.recover()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _outer_before(self, module: nn.Module, args: Any) -> None:
        if in_backward():
            return
        if module is self.model and self._stack and not self._inside:
            self.recover()  # an exception left the last forward before its end
        outermost = not self._stack
        self._push(None).of_model = module is self.model and outermost

    def _push(self, unit: Unit | None) -> Call:
        if not self._stack:
            self._begin_forward()
        self._sequence += 1
        call = Call(unit, self._sequence, self.forward_number)
        self._stack.append(call)
        return call

    def _begin_forward(self) -> None:
        if self._task != -1:
            self.recover()
        if inside_transform():
            prepare_for_transform(self.units)
        training = torch.is_grad_enabled()
        if training and self.micro_batches == 0:
            self.before_window()
        self.order.begin("train" if training else "evaluate")
        if training:
            self.forward_number += 1
        for unit in self.residents:
            unit.finish_refresh()
            if unit.sharded and (training or not unit.lent):
                self._hold(unit)

    def _hold(self, unit: Unit) -> None:
        """Keep `unit` gathered until the backward of this forward is over (or this forward is, when there will be none)."""
        if not any(held is unit for held, _ in self._held):
            self._held.append((unit, self.gathering.pin(unit)))

    def _outer_after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return None
        call = self._stack.pop()
        return self._leave(call, output)

    def _leave(self, call: Call, output: Any) -> Any:
        """A forward is over: hook its outputs so that its backward finds its weights, and tidy up after the last one."""
        training = torch.is_grad_enabled()
        hook = (lambda grad: self._before_backward(call, grad)) if training and not inside_transform() else None
        output = prepare_outputs(output, self.slots, hook)
        if training and call.unit is not None:
            call.unit.outstanding.append(call.sequence)
        if not self._stack and not training:
            self._release_held()
            self.release_all()
        return output

    # --------------------------------------------------------------------------------------------- forward, one unit's
    def _unit_before(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if in_backward():  # activation checkpointing computes the block again
            self._enter_backward()
            self.order.use(unit, backward=True)
            self._use_in_backward([(unit, None)])
            return
        call = self._push(unit)
        unit.finish_refresh()
        if not torch.is_grad_enabled() and unit.lent:
            return  # whole by a gathering context: ranks may call it differently often, as generation does
        self.order.use(unit, backward=False)
        if unit.sharded:
            call.leases.append((unit, self.gathering.pin(unit)))
            self.gathering.start_next()

    def _unit_after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return self._after_recomputing(module, output)
        call = self._stack.pop()
        for unit, slot in call.leases:
            self.gathering.let_go(unit, slot)
        assert call.unit is not None
        if self._reuse_is_bounded:
            self.gathering.release_if_far(call.unit)
        return self._leave(call, output)

    def _after_recomputing(self, module: nn.Module, output: Any) -> Any:
        """A checkpointed segment of several units: each finds its weights again when the segment's own backward comes."""
        used = [(unit, slot) for unit, slot in self._current if unit.module is module]
        if not used or not torch.is_grad_enabled():
            return None
        return prepare_outputs(output, self.slots, lambda grad: self._use_in_backward(used))

    # ----------------------------------------------------------------------------------------------- reads that are seen
    def touched(self, home: ParameterHome, func: Callable[..., Any]) -> None:
        """Something is about to read a parameter whose weights are not in place.

        Raises:
            ReleasedParameterError: it is sharded, and no forward or backward of the model is under way.
        """
        unit = home.unit
        unit.finish_refresh()
        if not unit.sharded or not any(home.name in flat.names for flat in unit.sharded):
            return
        if in_backward():
            self._use_in_backward([*self._current, (unit, None)])
        elif self._stack:
            slot = self.gathering.pin(unit)
            if self._stack[-1].unit is None:
                self._held.append((unit, slot))
            else:
                self._stack[-1].leases.append((unit, slot))
        else:
            text = messages.released(home.name, func, self.communicator.world_size)
            raise ReleasedParameterError(text if self.attached else messages.destroyed(home.name, func))

    def lend(self, home: ParameterHome) -> bool:
        """Gather a parameter for the forward or backward under way, which gives it back; whether there is one. Collective."""
        if not in_backward() and not (self._stack and torch.is_grad_enabled()):
            return False
        self.touched(home, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
        return True

    # ---------------------------------------------------------------------------------------------------------- backward
    def _enter_backward(self) -> None:
        """The first hook of a backward prepares the gradients and asks autograd to call us at its end."""
        if self._task != -1:
            return
        self._task = torch._C._current_graph_task_id()
        self._touched_forwards = set()
        self._earliest = math.inf
        self.gradients.begin_backward(deferring=self.defer())
        Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]
        for unit in self.residents:  # an earlier backward of the same graph, or a forward in between, let them go
            if unit.sharded:
                self._hold(unit)

    def _before_backward(self, call: Call, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a call's output has arrived: all calls that began later have finished their backward."""
        if not in_backward():
            return None
        self._enter_backward()
        self._touched_forwards.add(call.forward)
        unit = call.unit
        if unit is not None and call.sequence in unit.outstanding:
            unit.outstanding.remove(call.sequence)
            # A block that gives back its input shares its output with the call before: hooks come in the forward's order there.
            if call.sequence < self._earliest:
                self._earliest = call.sequence
                self._pass_units_after(call)
        if call.leases or (unit is not None and unit.whole):
            if unit is not None:
                self.order.use(unit, backward=True)
            if torch.is_grad_enabled() and any(self.slots.shared(used) for used, _ in call.leases):
                raise ModelError(messages.double_backward(len(self.units)))
            self._use_in_backward([(used, slot) for used, slot in call.leases], unit)
        return self.scale_outputs(grad) if call.of_model and self.scale_outputs is not None else None

    def _use_in_backward(self, leases: Iterable[tuple[Unit, Slot | None]], own: Unit | None = None) -> None:
        """Pin what the call under way (of the unit `own`) needs and unpin what the calls after it needed."""
        wanted = list(leases)
        pinned = dict(self._current)
        if wanted and all(unit in pinned and slot in (None, pinned[unit]) for unit, slot in wanted):
            return
        for left, slot_left in self._current:
            self.gathering.let_go(left, slot_left)
        self._current = []
        for unit, slot in wanted:
            unit.finish_refresh()
            if not unit.sharded:
                continue
            if unit is own and not unit.needs_weights_in_backward and unit.slot is None:
                unit.bind_shapes()
                continue
            self._current.append((unit, self.gathering.pin(unit, slot)))
        self.gathering.start_next()

    def _pass_units_after(self, call: Call) -> None:
        """Buffers of units with no earlier call outstanding get no further gradient in this backward."""

        def passed(gradient: FlatGradient) -> bool:
            unit = self._unit_of[gradient.flat.key]
            if unit is call.unit or unit.resident:
                return False
            return not any(sequence < call.sequence for sequence in unit.outstanding)

        self.gradients.advance(passed)

    @torch.no_grad()
    def _end_backward(self) -> None:
        if self._task == -1:
            return
        if self.gradients.anything_arrived:  # `autograd.grad` with respect to inputs brings none
            self.gradients.end_backward()
            if not self._touched_forwards or not self._touched_forwards <= self.forwards_seen:
                self.micro_batches += 1
            self.forwards_seen |= self._touched_forwards
        self._task = -1
        self._unpin()

    # ----------------------------------------------------------------------------------------------------------- tidying
    def _unpin(self) -> None:
        for unit, slot in self._current:
            self.gathering.let_go(unit, slot)
        self._current = []
        for unit in self.units:
            if unit.slot is None and unit.sharded:
                unit.release()
        if not self._stack:  # else a forward takes derivatives of its own and goes on
            self._release_held()

    def _release_held(self) -> None:
        for unit, slot in self._held:
            self.gathering.let_go(unit, slot)
        self._held = []

    def release_all(self) -> None:
        """Release every unit nobody uses now. Not collective."""
        for unit in self.units:
            if unit.slot is not None and unit.slot.pins == 0:
                unit.release()

    def recover(self) -> None:
        """Forget a forward or backward that an exception ended: nothing is in use any more."""
        if self._task != -1:  # part of a backward's gradients are summed already: the window cannot be saved
            self.gradients.reset(keep_memory=False)
            self.micro_batches = 0
        self._stack.clear()
        self._current = []
        self._held = []
        self._task = -1
        for slot in self.slots.slots:
            slot.pins = 0
        for unit in self.units:
            unit.outstanding.clear()
        self.order.close()

    def begin_window(self) -> None:
        """The step is done: nothing gathered is current, and a new window is counted."""
        self.recover()
        self.release_all()
        self.forwards_seen.clear()
        self.micro_batches = 0
