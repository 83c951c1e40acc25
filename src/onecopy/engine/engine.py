"""The engine users know: forward, backward, step, and what a run looks like from outside."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.comm.model_parallel import ModelParallel
from onecopy.config import Config
from onecopy.engine import assemble
from onecopy.engine.accumulation import AccumulationWindow
from onecopy.engine.agreement import agree_on_model, hash_of
from onecopy.engine.answers import Answers
from onecopy.engine.attributes import mark_parameters, unmark_parameters
from onecopy.engine.blocks import BlockMethods
from onecopy.engine.contract import Contract
from onecopy.engine.dtypes import half, move_buffers
from onecopy.engine.live_weights import LiveWeights, StaysInPlace
from onecopy.engine.moving_state import MovingState
from onecopy.engine.persistence import Persistence
from onecopy.engine.reporting import Reporter
from onecopy.engine.scaling import ScaledGradients
from onecopy.engine.thawing import Thawing
from onecopy.errors import ModelError
from onecopy.layout import placement_for_stage
from onecopy.observe.log import log_once
from onecopy.observe.timers import timers_for
from onecopy.optim.across_shards import AcrossShards
from onecopy.optim.fused import make_fused, supports_fused_scaling
from onecopy.optim.loss_scale import LossScaler
from onecopy.optim.masters import Masters
from onecopy.optim.state import take_states
from onecopy.optim.step import OptimizerStep, StepOutcome
from onecopy.optim.wrapper import ShardedOptimizer
from onecopy.sharding import FlatBuffer, Gradients, Limits, Runtime


class Engine(BlockMethods, nn.Module, Answers, ScaledGradients, Persistence, Contract):
    """A model whose training state is sharded over the ranks of a communicator.

    `engine(batch)`, `engine.backward(loss)` and `engine.step()` are collective: every rank calls them in the same order.

    Attributes:
        module: the user's model; attributes not found on the engine are looked up there.
        optimizer: a `torch.optim.Optimizer` over this rank's masters, or None for inference.
        basic_optimizer: the optimizer inside it.
        lr_scheduler: stepped by `step()` if it was given to `initialize` or configured.
        config: the user's own dictionary; `configuration` is what it was resolved to.
        global_steps, global_samples: boundaries passed so far, and the samples they stand for.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        communicator: Communicator,
        optimizer: Any = None,
        model_parameters: Any = None,
        model_parallel: ModelParallel | None = None,
    ) -> None:
        super().__init__()
        self.model_parallel = model_parallel
        self.module = model
        self.configuration = config
        self.config = config.source
        self.communicator = communicator
        self.device = communicator.device
        self.placement = placement_for_stage(config.zero.stage, communicator.world_size)
        self.timers = timers_for(config.wall_clock_breakdown, self.device)
        self.reporter = Reporter(config, communicator)
        self.window = AccumulationWindow(config.gradient_accumulation_steps, config.managed_gradient_accumulation)
        self.scaler = LossScaler.from_config(config.fp16) if config.fp16.enabled else None
        ScaledGradients._scales_exist |= self.scaler is not None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self._skipped = 0
        self._step_applied = False
        self._outcome: StepOutcome | None = None
        self._unread: list[StepOutcome] = []
        self._loss_is_scaled = False
        self._deferred_by_user = False
        self._order_agreed = communicator.world_size == 1
        self._destroyed = False
        self._build(optimizer, model_parameters)
        object.__setattr__(model, "_apply", StaysInPlace(self))

    # ---------------------------------------------------------------------------------------------------------- building
    def _build(self, optimizer: Any, model_parameters: Any) -> None:
        # First of all: a rank whose model differs would fail alone further down, and leave the others waiting.
        changed = agree_on_model(self.module, self.communicator)
        trained = assemble.choose_optimizer(self.module, self.configuration, optimizer, model_parameters)
        assemble.check_free(self.module, trained.group_of)
        for parameter in self.module.parameters():
            parameter.grad = None  # of a backward before this engine: no step of its own would ever clear it
        move_buffers(self.module, self.configuration, self.device)
        if changed:
            self.reporter.say("ranks started with different weights; rank 0's were sent to all of them")
        inner = trained.optimizer
        states = take_states(inner, self.module) if inner is not None else {}
        self._drop_untrained_gradients(trained.group_of)
        self.block_modules = assemble.find_blocks(self.module, self.configuration)
        self.units = assemble.make_units(
            self.module, self.configuration, self.placement, trained.group_of, self.communicator
        )
        slots = assemble.make_slots(self.units, self.configuration, self.communicator)
        self.gradients = Gradients(
            self._reduce_order(),
            self.communicator,
            self.placement,
            self.configuration.communication_data_type,
            self.configuration.data_types.grad_accum_dtype or torch.float32,
            assemble.overlaps(self.configuration),
            self.timers.phase,
        )
        zero = self.configuration.zero
        limits = Limits(zero.prefetch_bucket_size, zero.max_reuse_distance, assemble.overlaps(self.configuration))
        self.runtime = Runtime(
            self.module, self.units, slots, self.gradients, self.communicator, limits, self.timers.phase
        )
        self.runtime.defer = self._gradients_stay_whole
        self.runtime.scale_outputs = self._scale_output_gradient
        self.runtime.gradient_divisor = self._divisor
        self.gradients.micro_batches_in_window = lambda: self.window.steps
        mark_parameters(self.module, self.units, self.configuration, self.communicator)
        self.live = LiveWeights(self.module)
        self.moving = MovingState(self.module, self.device)
        self.basic_optimizer = inner
        self.optimizer: ShardedOptimizer | None = None
        if inner is not None:
            self.masters = Masters([gradient.flat for gradient in self.gradients.all], inner)
            self.masters.restore(states)
            self.runtime.masters = self.masters
            if isinstance(inner, AcrossShards):
                inner.bind(self.masters, self.communicator)
            if supports_fused_scaling(inner):
                make_fused(inner)
            self.thawing = Thawing(self, trained.group_of)
            self.runtime.before_window = self.thawing.look
            self.optimizer_step = OptimizerStep(self.masters, self.gradients, self.communicator, self.model_parallel)
            self.optimizer = ShardedOptimizer(
                inner,
                self._update,
                self.zero_grad,
                self._last_update_applied,
                self.loss_scale,
            )
        self._clear_window()
        self.reporter.describe(self)

    def _drop_untrained_gradients(self, group_of: dict[int, int]) -> None:
        """Parameters in no optimizer group, and those without elements, keep no gradient: nothing would read it."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        untrained = [p for p in parameters if id(p) not in group_of or p.numel() == 0]
        self._untrained: list[Any] = []
        self._drop_gradients_of(untrained)

    def _drop_gradients_of(self, parameters: list[nn.Parameter]) -> None:
        self._untrained += [p.register_post_accumulate_grad_hook(_forget_gradient) for p in parameters]

    def _reduce_order(self) -> list[FlatBuffer]:
        """Trained flat buffers in the canonical order: blocks from the last to the first, then what the root owns."""
        blocks = [unit for unit in self.units if not unit.resident]
        residents = [unit for unit in self.units if unit.resident]
        return [flat for unit in [*reversed(blocks), *residents] for flat in unit.buffers if flat.trainable]

    # ----------------------------------------------------------------------------------------------------------- forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Collective."""
        self._check_states_are_here()
        with self.timers.phase("forward"), self._autocast(), self.runtime.inside_forward():
            if self.configuration.fp16.enabled and self.configuration.fp16.auto_cast:
                args, kwargs = half((args, kwargs))
            if ScaledGradients._scales_exist and torch.is_grad_enabled():
                args, kwargs = torch.utils._pytree.tree_map(self._hook_input, (args, kwargs))
            with self.reporter.flops.forward(self):
                output = self.module(*args, **kwargs)
        self.reporter.saw_output(self, output)
        return output

    def _autocast(self) -> AbstractContextManager[Any]:
        settings = self.configuration.torch_autocast
        if not settings.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, settings.dtype or torch.bfloat16)

    # ---------------------------------------------------------------------------------------------------------- backward
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Compute and reduce the gradients of `loss`, a scalar. Collective.

        The update uses the mean over the window's micro-batches, so the loss is given as it is. With
        `scale_wrt_gas=False` the caller has divided it by the number of micro-batches already.

        Returns:
            The loss divided by `gradient_accumulation_steps` (the very object with `scale_wrt_gas=False`).
        """
        assert isinstance(loss, torch.Tensor) and loss.numel() == 1, (
            f"engine.backward needs a scalar loss, not {_kind(loss)}; reduce it with .mean() or .sum(), "
            "or call tensor.backward(gradient=...)"
        )
        if self.optimizer is None:
            raise ModelError(
                "engine.backward needs an optimizer: give one to initialize, or put an optimizer block into the configuration"
            )
        if not scale_wrt_gas:
            self._divided_by_caller = True
        before, ScaledGradients._scale_of_loss = ScaledGradients._scale_of_loss, self.loss_scale()
        try:
            with self.timers.phase("backward"):
                self.scale(loss, mark=False).backward(retain_graph=retain_graph, **kwargs)
        finally:
            ScaledGradients._scale_of_loss = before
            self._loss_is_scaled = False
        steps = self.window.steps
        self.reporter.saw_loss(loss)
        return loss / steps if scale_wrt_gas and steps > 1 else loss

    def _gradients_stay_whole(self) -> bool:
        """Whether the backward that begins now leaves its gradients unreduced on this rank."""
        if self.placement.gradients.sharded:
            return False
        return self._deferred_by_user or not self.window.expects_boundary(self.runtime.micro_batches + 1)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not reduce where gradients are whole (stages 0, 1); where they are sharded they do.

        The weights after the step are the same either way.
        """
        before, self._deferred_by_user = self._deferred_by_user, True
        try:
            yield
        finally:
            self._deferred_by_user = before

    coalesce_grad_reduction = no_sync

    # -------------------------------------------------------------------------------------------------------------- step
    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return self.window.is_boundary(self.runtime.micro_batches)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next steps are boundaries, until said otherwise."""
        self.window.forced = bool(is_boundary)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at a boundary clip, update the weights, clear the gradients and step the scheduler. Collective."""
        if self.optimizer is None:
            raise ModelError(
                "engine.step needs an optimizer: give one to initialize, or put an optimizer block into the configuration"
            )
        batches = self.runtime.micro_batches
        boundary = self.window.is_boundary(batches)
        advice = self.window.advice(batches) if boundary else None
        if advice is not None:
            log_once((advice[0], id(self)), advice[1])
        self.window.step_called(boundary, batches)
        self._between_boundaries = not boundary
        if not boundary:
            return
        self.reporter.flops.step_begins()
        with self.timers.phase("step"):
            self.optimizer.step()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._step_scheduler(lr_kwargs or {})
        self.timers.step_done()
        self.reporter.step_done(self)

    def _update(self) -> None:
        """What a boundary does to weights and gradients, without the counters: `optimizer.step()`."""
        self._check_states_are_here()
        self.live.look(self.units)
        self.gradients.settle()
        outcome = self.optimizer_step.apply(self._divisor(), self.configuration.gradient_clipping)
        if outcome.unused and not self.configuration.zero.ignore_unused_parameters:
            with torch._C.DisableTorchFunctionSubclass():
                trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
            names = ", ".join(sorted(outcome.unused & trained)[:5])
            if names:
                raise ModelError(
                    f"no gradient reached {names}; freeze them, or set zero_optimization.ignore_unused_parameters to true"
                )
        self._outcome = outcome
        self._unread.append(outcome)
        if self._reads_at_once:
            self._read_outcomes()
        self._agree_on_order()
        self._clear_window()
        for unit in self.units:
            for flat in unit.whole:
                flat.start_refresh()
        self.communicator.counters.snapshot()

    def _divisor(self) -> float:
        """What the gradient sums are divided by to be the mean over ranks and micro-batches."""
        divisor = float(self.communicator.world_size if self.configuration.gradient_allreduce_op == "mean" else 1)
        if not self._divided_by_caller:
            divisor *= max(1, self.runtime.micro_batches)
        return divisor * (self.scaler.scale if self.scaler is not None else 1.0)

    _divided_by_caller = False

    def _clear_window(self) -> None:
        self.gradients.reset(keep_memory=self.window.steps > 1)
        self.runtime.begin_window()
        self._divided_by_caller = False
        self._loss_is_scaled = False
        self._keep_what_moves()

    def _agree_on_order(self) -> None:
        """After the first window: use units' recorded order if all ranks recorded the same."""
        if self._order_agreed:
            return
        self._order_agreed = True
        used = self.runtime.order.forward_units()
        order = used + [unit for unit in self.units if unit not in used]
        if len(set(self.communicator.exchange(hash_of([unit.name for unit in order]), "order of units"))) == 1:
            self.units = order
            self.runtime.units = order
            self.runtime.slots.assign([unit for unit in order if unit.sharded])
            self.gradients.set_order(self._reduce_order())

    def _step_scheduler(self, lr_kwargs: dict[str, Any]) -> None:
        if self.lr_scheduler is not None and self._step_applied:
            self.lr_scheduler.step(**lr_kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window so far, as in torch; in mid-window it says so once."""
        if self.runtime.micro_batches:
            log_once(
                ("zero_grad", id(self)),
                f"zero_grad() discarded the gradients of {self.runtime.micro_batches} micro-batch(es) that no step had used; "
                "engine.step() clears gradients itself, so the call can go",
            )
        self._clear_window_gradients()

    def _clear_window_gradients(self) -> None:
        self.gradients.reset(keep_memory=self.window.steps > 1)
        self.runtime.forwards_seen.clear()
        self.runtime.micro_batches = 0
        self.window.discarded()
        self._divided_by_caller = False
        self._keep_what_moves()

    # ---------------------------------------------------------------------------------------------------- being a module
    def train(self, mode: bool = True) -> "Engine":
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> "Engine":
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            return getattr(self._modules["module"], name)

    def destroy(self) -> None:
        """Take the hooks off, free the buffers and leave the process groups. Collective."""
        if self._destroyed:
            return
        self._destroyed = True
        for unit in self.units:
            unit.finish_refresh()
        self.gradients.reset(keep_memory=False)
        self.runtime.begin_window()
        self.runtime.detach()
        self._leave_blocks()
        vars(self.module).pop("_apply", None)
        self._free()
        unmark_parameters(self.module)
        self.reporter.close()
        self.communicator.close()

    def _free(self) -> None:
        """Let go of all training state; whole weights stay the model's, sharded ones are gone."""
        for handle in self._untrained:
            handle.remove()
        self.runtime.slots.free()
        self.gradients.free()
        if self.optimizer is not None:
            self.masters.runs.clear()
            self.optimizer.state.clear()
            for group in self.optimizer.param_groups:
                group["params"] = []
        for unit in self.units:
            for flat in unit.buffers:
                flat.free()


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _kind(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
