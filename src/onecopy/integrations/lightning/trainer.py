"""`OneCopyStrategy`: Lightning's Trainer on the sharded engine, with ZeRO stages 0 to 3, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from onecopy.engine import Engine
from onecopy.engine.handover import engine_of
from onecopy.errors import ModelError
from onecopy.integrations.lightning import settings
from onecopy.integrations.lightning.checkpoints import TAG, find_folder, read_single_file
from onecopy.integrations.lightning.engines import make_engine, release
from onecopy.integrations.lightning.packages import trainer_module
from onecopy.integrations.lightning.precision import TrainerPrecision
from onecopy.integrations.lightning.schedule import unless_skipped
from onecopy.integrations.lightning.sharded import ShardedStrategy
from onecopy.observe.log import note
from onecopy.optim.schedules import build_scheduler

_is_overridden = trainer_module("utilities.model_helpers").is_overridden
_optimizer_module = trainer_module("core.optimizer")
_FITTING = trainer_module("trainer.states").TrainerFn.FITTING
_LightningModule = trainer_module("core.module").LightningModule
_LRSchedulerConfig = trainer_module("utilities.types").LRSchedulerConfig


class OneCopyStrategy(ShardedStrategy, trainer_module("strategies.ddp").DDPStrategy):  # type: ignore[misc]
    """Shards the training state of a LightningModule over the ranks.

    Args:
        stage: ZeRO stage 0 to 3; default what the configuration says, else 2.
        config: the JSON document, as a dictionary or a path. Precision, accumulation and clipping come from the Trainer;
            what is written in both places must agree.
        exclude_frozen_parameters: leave frozen parameters out of checkpoints.
        timeout, process_group_backend, cluster_environment, parallel_devices, start_method, ...: as in `DDPStrategy`.

    Attributes:
        engine: the `onecopy.Engine` once training or evaluation has begun; `trainer.model` is the same object.
    """

    strategy_name = "onecopy"
    _single_file: Mapping[str, Any] | None = None

    @property
    def engine(self) -> Engine:
        assert isinstance(self.model, Engine), "there is an engine only between the Trainer's set-up and its end"
        return self.model

    # --------------------------------------------------------------------------------------------------------- precision
    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        """Whatever plugin Lightning chose for this precision is replaced by the engine's."""
        self._precision_plugin: Any = None  # as long as Lightning has not chosen: it would take ours for the user's
        if plugin is not None:
            name = str(plugin.precision)
            self._precision_plugin = TrainerPrecision(name, settings.compute_dtype(self.source, name))

    # ------------------------------------------------------------------------------------------------------------ set-up
    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fitting = trainer.state.fn == _FITTING
        self._refuse_hooks(trainer)
        before = engine_of(module)
        if before is not None and (fitting or before.zero_optimization_stage() != self.stage):
            release(module)
            before = None
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)
        if fitting:
            self._begin_training(trainer)
        else:
            self.model = before or make_engine(
                module, settings.for_inference(self._document(trainer)), self.root_device
            )
        self._precision_plugin.engine = self.engine
        self.setup_precision_plugin()
        self.barrier()

    def _refuse_hooks(self, trainer: Any) -> None:
        if _is_overridden("backward", self.lightning_module, _LightningModule):
            raise ModelError(
                "LightningModule.backward is overridden, and the engine runs the backward pass itself; "
                "compute what it did in training_step, or call self.manual_backward in manual optimization"
            )
        algorithm = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)
        if trainer.gradient_clip_val and algorithm not in (None, "norm"):
            raise ModelError(
                'Trainer(gradient_clip_algorithm="value") is not supported: ranks hold shards of summed gradients; use "norm"'
            )

    def _document(self, trainer: Any) -> dict[str, Any]:
        said = {
            "gradient_clipping": trainer.gradient_clip_val,
            "gradient_accumulation_steps": trainer.accumulate_grad_batches,
        }
        return settings.complete(self.source, self._precision_plugin.precision, said, _batch_size(trainer))

    def _begin_training(self, trainer: Any) -> None:
        """Make optimizer, schedulers and engine; the scheduler stays Lightning's to step."""
        module = self.lightning_module
        document = self._document(trainer)
        optimizers, schedulers = _optimizer_module._init_optimizers_and_lr_schedulers(module)
        if len(optimizers) != 1:
            raise ModelError(
                f"configure_optimizers returned {len(optimizers)} optimizers; an engine has one: put their parameters into groups of "
                "one optimizer, or train the parts in modules and strategies of their own"
            )
        optimizer = optimizers[0]
        if isinstance(optimizer, _optimizer_module._MockOptimizer):
            if "optimizer" not in document:
                raise ModelError(
                    "configure_optimizers returned None, and the configuration has no optimizer block; give one of them"
                )
            optimizer = None
        engine = make_engine(module, document, self.root_device, optimizer)
        settled = engine.configuration.scheduler
        if settled is not None and not schedulers:
            made = build_scheduler(settled.type, dict(settled.params), engine.basic_optimizer)
            schedulers = [_LRSchedulerConfig(made, interval="step")]
        if engine.scaler is not None:
            for entry in schedulers:
                if entry.interval == "step":
                    entry.scheduler = unless_skipped(entry.scheduler, engine)
        self.model = engine
        self.optimizers = [engine.optimizer]
        self.lr_scheduler_configs = schedulers

    def model_to_device(self) -> None:
        """Nothing: the engine takes the weights to the device as it shards them."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """At stage 3 a module is built on the CPU, for the whole of it may not fit on a device."""
        with nullcontext() if self.stage == 3 else super().tensor_init_context(empty_init=empty_init):
            yield

    # ---------------------------------------------------------------------------------------------------------- training
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Inside the engine's forward; a manual loop, whose steps and backwards may not be inside one, goes without."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self._precision_plugin.train_step_context(), self.engine._autocast():
            return self.lightning_module.training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.no_sync():
            yield

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Keep the engine's window as long as the Trainer's, which a callback may change."""
        if self.lightning_module.automatic_optimization:
            self.engine.window.steps = self.lightning_module.trainer.accumulate_grad_batches

    # ------------------------------------------------------------------------------------------------------- checkpoints
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: the engine saves the weights. `onecopy.zero.GatheredParameters` shows them whole."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: the engine saves the optimizer's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save into the folder `filepath`. Collective."""
        if storage_options is not None:
            raise TypeError("storage_options is not supported: the engine's ranks write their files themselves")
        client = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.engine.save_checkpoint(
            self.broadcast(str(filepath)), TAG, client, exclude_frozen_parameters=self.exclude_frozen_parameters
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder saved by this strategy, or the weights of a single file of Lightning's. Collective."""
        path = self.broadcast(str(checkpoint_path))
        self._single_file = None
        folder = find_folder(path)
        fitting = self.lightning_module.trainer.state.fn == _FITTING
        if folder is None:
            found = read_single_file(path, weights_only)
            if fitting:
                note(f"{path} is a single file: its weights and progress are restored, the optimizer's state is not")
            self._single_file = found
            return found
        _, client = self.engine.load_checkpoint(
            folder,
            TAG,
            load_module_strict=self.lightning_module.strict_loading and not self.exclude_frozen_parameters,
            load_optimizer_states=fitting,
            load_lr_scheduler_states=False,
        )
        assert client is not None  # a missing checkpoint has raised
        return client

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The engine has loaded its own checkpoints already; a single file's weights are taken here."""
        if self._single_file is not None:
            self.engine.load_module_state_dict(dict(checkpoint["state_dict"]), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: the engine has loaded it."""

    # --------------------------------------------------------------------------------------------------------------- end
    def teardown(self) -> None:
        """The module stays sharded for the next Trainer; `onecopy.integrations.lightning.release` makes it whole."""
        if isinstance(self.model, Engine):
            self.model.wait_for_checkpoint()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self._precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _batch_size(trainer: Any) -> int:
    """Samples of a rank's batch as the training loader says; 1 where it does not."""
    source = trainer.fit_loop._data_source
    if trainer.state.fn == _FITTING and source.is_defined():
        sampler = getattr(source.dataloader(), "batch_sampler", None)
        size = getattr(sampler, "batch_size", None)
        return size if isinstance(size, int) else 1
    return 1
