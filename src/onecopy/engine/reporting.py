"""What a run says and records: monitors, the line of steps_per_print, the table of phases, a trace, bytes by category."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.comm import Communicator
from onecopy.config import Config
from onecopy.engine.recording import RunRecord
from onecopy.engine.step_flops import StepFlops
from onecopy.observe.activations import saved_nbytes
from onecopy.observe.log import SkippedSteps, note
from onecopy.observe.monitor import monitors_from
from onecopy.observe.progress import Progress, memory_line
from onecopy.observe.trace import StepTracer
from onecopy.optim.loss_scale import LossScaler
from onecopy.sharding.outputs import tensors_in

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine


class Reporter:
    """Says things on rank 0 and writes monitor events; reading values happens only when a line or an event is due."""

    def __init__(self, config: Config, communicator: Communicator) -> None:
        self.config = config
        self.monitor = monitors_from(config, communicator.rank)
        self.progress = Progress()
        self._skipped = SkippedSteps()
        self._activations: int | None = None  # bytes
        self._loss: torch.Tensor | None = None
        self._tracer = StepTracer(config.onecopy.trace_step, config.onecopy.trace_path, communicator.rank)
        self._tracer.begin(1)
        self.flops = StepFlops(config.flops_profiler, communicator.rank)
        self._record = RunRecord(config.onecopy.record, config.onecopy.record_step, communicator.rank)

    def saw_output(self, engine: "Engine", output: Any) -> None:
        """Count what the first training forward keeps for its backward, on the CPU, where no allocator records a peak."""
        if self._activations is not None or not torch.is_grad_enabled() or engine.device.type != "cpu":
            return
        if engine.communicator.imagined:
            return
        flats = [flat for unit in engine.units for flat in unit.buffers]
        weights = {flat.whole.untyped_storage()._cdata for flat in flats if flat.whole is not None}
        weights |= {
            tensor.untyped_storage()._cdata for tensor in engine.module.parameters() if type(tensor) is nn.Parameter
        }
        self._activations = saved_nbytes(tensors_in(output), weights | engine.runtime.slots.storages)

    def say(self, message: str) -> None:
        note(message)

    def describe(self, engine: "Engine") -> None:
        """Print what `dump_state` and `memory_breakdown` ask for at start-up."""
        if self.config.dump_state:
            self.say(self.config.report())
        if self.config.memory_breakdown:
            self.say(memory_line(self.memory(engine)))
        self._record.begins(engine)

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Keep the loss if a line or an event will show it; else no byte is held over to the next step."""
        self.flops.backward_done()
        if self.config.steps_per_print or self.monitor.enabled:
            self._loss = loss.detach()

    def skipped(self, step: int, scaler: LossScaler | None) -> None:
        """A step found a gradient that is not finite and changed nothing."""
        detail = "" if scaler is None or self.config.fp16.loss_scale else f"The loss scale was {scaler.scale:g}."
        self._skipped.skipped(step, detail)

    def step_done(self, engine: "Engine") -> None:
        """A boundary has passed: write events, print what is due."""
        step = engine.global_steps
        self._tracer.end(step)
        self._record.step_done(engine)
        self.flops.step_done(engine)
        self._tracer.begin(step + 1)
        self.progress.step_done(engine.train_batch_size())
        if self.monitor.enabled:
            self._write_events(engine)
        every = self.config.steps_per_print
        if not every or step % every:
            return
        self.say(
            self.progress.line(
                step,
                rates=engine.get_lr(),
                loss=None if self._loss is None else self._read(engine, self._loss),
                skipped=engine.skipped_steps,
                loss_scale=engine.loss_scale() if engine.scaler is not None else None,
                grad_norm=engine.get_global_grad_norm(),
            )
        )
        if self.config.wall_clock_breakdown:
            self.say("\n" + engine.timers.table())
            engine.timers.reset()
        if self.config.memory_breakdown:
            self.say(memory_line(self.memory(engine)))

    def _read(self, engine: "Engine", value: torch.Tensor) -> float | None:
        read = engine.communicator.read(value.reshape(1))
        return None if read is None else float(read[0])

    def _write_events(self, engine: "Engine") -> None:
        samples = engine.global_samples
        events = [("Train/Samples/lr", float(engine.get_lr()[0]), samples)]
        if self._loss is not None:
            loss = self._read(engine, self._loss)
            events += [] if loss is None else [("Train/Samples/train_loss", loss, samples)]
        if engine.scaler is not None:
            events.append(("Train/Samples/loss_scale", engine.scaler.scale, samples))
        if self.config.wall_clock_breakdown:
            milliseconds = engine.timers.milliseconds()
            events += [
                (f"Train/Samples/elapsed_time_ms_{name.replace(' ', '_')}", value, samples)
                for name, value in milliseconds.items()
            ]
        self.monitor.write_events(events)

    def memory(self, engine: "Engine") -> dict[str, int]:
        """Bytes on this rank by category; categories do not overlap.

        On an accelerator `activations_peak` is what its allocator held at most beyond the training state. On the CPU,
        where nothing records that, it is what the first training forward kept for its backward; 0 before that.
        """
        flats = [flat for unit in engine.units for flat in unit.buffers]
        wholes = {flat.whole.untyped_storage()._cdata for flat in flats if flat.whole is not None}
        masters = [f.master for f in flats if f.master is not None and f.master.untyped_storage()._cdata not in wholes]
        managed = {id(parameter) for flat in flats for parameter in flat.parameters}
        others = [p for p in engine.module.parameters() if id(p) not in managed]
        categories = {
            "parameters": sum(f.whole.nbytes for f in flats if f.whole is not None)
            + sum(f.shard.nbytes for f in flats if f.shard is not None)
            + sum(p.nbytes for p in others)
            + sum(b.nbytes for b in engine.module.buffers()),
            "slots": engine.runtime.slots.nbytes,
            "gradients": engine.gradients.nbytes,
            "masters": sum(master.nbytes for master in masters),
            "moments": engine.masters.state_nbytes() if engine.optimizer is not None else 0,
        }
        peak = self._activations or 0
        if engine.device.type != "cpu":
            peak = max(0, torch.accelerator.max_memory_allocated(engine.device) - sum(categories.values()))
        return {**categories, "activations_peak": peak}

    def close(self) -> None:
        self._tracer.close()
        self._record.close()
        self.monitor.close()
