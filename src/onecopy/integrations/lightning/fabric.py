"""`OneCopyFabricStrategy`: Lightning Fabric on the sharded engine, with ZeRO stages 0 to 3, on CPUs and GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from onecopy.engine import Engine
from onecopy.errors import CheckpointError, ModelError
from onecopy.integrations.lightning import settings
from onecopy.integrations.lightning.checkpoints import TAG, find_folder, read_single_file
from onecopy.integrations.lightning.engines import make_engine
from onecopy.integrations.lightning.packages import fabric_module
from onecopy.integrations.lightning.precision import FabricPrecision, clip_next_step, step
from onecopy.integrations.lightning.sharded import ShardedStrategy

_BackwardSyncControl: Any = fabric_module("strategies.strategy")._BackwardSyncControl
_move_state_into = fabric_module("utilities.load")._move_state_into


class OneCopyFabricStrategy(ShardedStrategy, fabric_module("strategies.ddp").DDPStrategy):  # type: ignore[misc]
    """Shards the training state of the modules given to `fabric.setup(module, optimizer)`.

    A loop accumulates as with Fabric's DDP: gradients of several `fabric.backward` add up, and `optimizer.step()` uses
    their sum.

    Args:
        stage: ZeRO stage 0 to 3; default what the configuration says, else 2.
        config: the JSON document, as a dictionary or a path; precision comes from Fabric.
        exclude_frozen_parameters: leave frozen parameters out of checkpoints.
        timeout, process_group_backend, cluster_environment, ...: as in Fabric's `DDPStrategy`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._engines: list[Engine] = []
        super().__init__(*args, **options)
        self._backward_sync_control = _NoSync()

    @property
    def precision(self) -> Any:
        return self._precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = None
        if plugin is not None:
            name = str(plugin.precision)
            self._precision = FabricPrecision(name, settings.compute_dtype(self.source, name))

    # ------------------------------------------------------------------------------------------------------------ set-up
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Engine, list[Any], Any]:
        """Make the engine. Collective."""
        if len(optimizers) != 1:
            raise ModelError(
                f"fabric.setup was given {len(optimizers)} optimizers; an engine has one: put their parameters into groups of one "
                "optimizer, or set each part up as a module of its own"
            )
        engine = self._engine(module, self._document(), optimizers[0])
        return engine, [engine.optimizer], scheduler

    def setup_module(self, module: nn.Module) -> Engine:
        """An engine without an optimizer, for inference. Collective."""
        return self._engine(module, settings.for_inference(self._document()), None)

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise ModelError(
            "the engine shards a module and its optimizer together: call fabric.setup(module, optimizer) "
            "in place of setup_module and setup_optimizers"
        )

    def _document(self) -> dict[str, Any]:
        said = {"gradient_clipping": None, "gradient_accumulation_steps": None}
        return settings.complete(self.source, self.precision.precision, said, 1)

    def _engine(self, module: nn.Module, document: dict[str, Any], optimizer: Any) -> Engine:
        engine = make_engine(module, document, self.root_device, optimizer)
        self._engines.append(engine)
        return engine

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Around `fabric.init_module()`: at stage 3 a module is sharded as it is built. Collective there."""
        if self.stage == 3:
            return self.module_sharded_context()
        context: AbstractContextManager[Any] = super().module_init_context(empty_init=empty_init)
        return context

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """As `module_init_context`, without devices and dtypes."""
        return self.model_sharded_context()

    # ---------------------------------------------------------------------------------------------------------- training
    def backward(self, tensor: torch.Tensor, module: nn.Module | None, **kwargs: Any) -> None:
        engine = module if isinstance(module, Engine) else None
        if engine is None:
            trained = [each for each in self._engines if each.optimizer is not None]
            if len(trained) != 1:
                raise ModelError(
                    f"{len(trained)} modules with an optimizer were set up; say whose loss it is: fabric.backward(loss, model=model)"
                )
            engine = trained[0]
        engine.backward(tensor, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        for engine in self._engines:
            if engine.optimizer is optimizer:
                closure = kwargs.pop("closure", None)
                result = closure() if closure is not None else None
                step(engine)
                return result
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """The next step clips to `max_norm`. Returns the norm before clipping. Collective.

        With `error_if_nonfinite` a norm that is not finite raises RuntimeError, as torch does.
        """
        if float(norm_type) != 2.0:
            raise ModelError(f"norm_type={norm_type} is not supported: the engine clips by the L2 norm")
        engine = self._of(module)
        clip_next_step(engine, max_norm, "norm")
        engine.gradients.settle()
        norm = engine.optimizer_step._agree(engine._divisor())[0].to(torch.float32)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                "The total norm of order 2.0 for gradients is non-finite, so it cannot be clipped; "
                "with error_if_nonfinite=False the engine skips such a step"
            )
        return norm

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        clip_next_step(self._of(module), clip_val, "value")

    def _of(self, module: Any) -> Engine:
        if not isinstance(module, Engine):
            raise ModelError(
                "the module was not set up by this strategy; give what fabric.setup(module, optimizer) returned"
            )
        return module

    # ------------------------------------------------------------------------------------------------------- checkpoints
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save the engine in `state` and the rest of it into the folder `path`. Collective."""
        if storage_options is not None or filter is not None:
            raise TypeError(
                "storage_options and filter are not supported: the engine's ranks write their files themselves"
            )
        engine = _only_engine(state, "saved")
        rest = {key: value for key, value in state.items() if value is not engine and value is not engine.optimizer}
        client = self._convert_stateful_objects_in_state(rest, filter={})
        engine.save_checkpoint(
            self.broadcast(str(path)), TAG, client, exclude_frozen_parameters=self.exclude_frozen_parameters
        )

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the engine in `state` from the folder `path`, and the rest of `state` in place. Collective.

        A module alone (`fabric.load_raw`) takes the weights of a single file. Returns what `state` did not ask for.
        """
        path = self.broadcast(str(path))
        if isinstance(state, Engine):
            state.load_module_state_dict(read_single_file(path, weights_only), strict=strict)
            return {}
        if not isinstance(state, dict) or not state:
            raise CheckpointError(
                "fabric.load needs the state to restore, with the module that fabric.setup returned in it"
            )
        engine = _only_engine(state, "loaded")
        folder = find_folder(path)
        if folder is None:
            raise CheckpointError(f"{path} is a single file; load its weights with fabric.load_raw")
        with_optimizer = any(value is engine.optimizer for value in state.values() if value is not None)
        _, client = engine.load_checkpoint(
            folder,
            TAG,
            load_module_strict=strict and not self.exclude_frozen_parameters,
            load_optimizer_states=with_optimizer,
            load_lr_scheduler_states=False,
        )
        assert client is not None
        wanted = {key for key, value in state.items() if value is not engine and value is not engine.optimizer}
        missing = sorted(wanted - set(client))
        if strict and missing:
            raise KeyError(
                f"The requested state contains a key '{missing[0]}' that does not exist in the loaded checkpoint."
            )
        _move_state_into(source=client, destination=state, keys=wanted & set(client))
        return client

    def teardown(self) -> None:
        for engine in self._engines:
            engine.wait_for_checkpoint()
        super().teardown()


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    """`fabric.no_backward_sync(module)`."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[Any]:
        return module.no_sync() if enabled and isinstance(module, Engine) else nullcontext()


def _only_engine(state: dict[str, Any], verb: str) -> Engine:
    found = [value for value in state.values() if isinstance(value, Engine)]
    if len(found) != 1:
        raise CheckpointError(
            f"the state to be {verb} has {len(found)} modules that fabric.setup returned; a checkpoint holds exactly one, "
            "so give each its own path"
        )
    return found[0]
