"""The engine's methods that touch the disk; `onecopy.checkpoint` does the work and is imported when one is called."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from onecopy.errors import ModelError
from onecopy.sharding.parameter import ReleasedEntry

if TYPE_CHECKING:
    import torch

    from onecopy.checkpoint.export import Exporter
    from onecopy.checkpoint.load import Loader
    from onecopy.checkpoint.save import Saver
    from onecopy.comm.model_parallel import ModelParallel
    from onecopy.engine.engine import Engine
    from onecopy.engine.weights_in_reach import AwaitedWeights

Folder = str | os.PathLike[str]


class Persistence:
    """Saves and loads the training state; mixed into the engine. Every method is collective unless it says otherwise."""

    awaited: AwaitedWeights | None = None  # what a model of the meta device still lacks
    model_parallel: ModelParallel | None
    after_save: Callable[[Folder], None] | None = None  # called on rank 0 with the folder given, after each save
    _saver: Saver | None = None
    _loader: Loader | None = None
    _exporter: Exporter | None = None

    def save_checkpoint(
        self,
        save_dir: Folder,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole training state into the folder `save_dir/tag`; any stage and world size can load it.

        A checkpoint is there completely or not at all. With `checkpoint.async` the call returns when the shards are
        copied. Model-parallel ranks save their parts into folders of their own, `save_dir/mp_rank_00` and so on. In the
        middle of a window the gradients so far are not part of it.

        Args:
            tag: name of the checkpoint; default "global_step" and the number of steps.
            client_state: a dictionary of plain data and tensors that `load_checkpoint` returns.
            save_latest: let the file `latest` name it.
            exclude_frozen_parameters: leave out what is not trained; such a checkpoint loads with `load_module_strict=False`.

        Returns:
            True.

        Raises:
            CheckpointError: on every rank, when it could not be saved, or when a rank did not call; says which and why.
        """
        from onecopy.checkpoint.parts import part_folder

        self._check_there_is_state()
        folder = part_folder(self.model_parallel, save_dir)
        saved = self._checkpoint_saver().save(folder, tag, client_state, save_latest, exclude_frozen_parameters)
        if self.after_save is not None and cast("Engine", self).global_rank == 0:
            self.after_save(save_dir)
        return saved

    def load_checkpoint(
        self,
        load_dir: Folder,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, whatever stage, world size and precision it was saved at.

        Args:
            tag: which one; default what `latest` names, or the newest complete one where that is damaged; "latest" is
                the same but raises where there is none.
            load_module_strict: False loads the weights that both the model and the checkpoint have.
            load_optimizer_states: False loads weights, counters and schedule only.
            load_module_only: weights only; counters stay as they are.
            custom_load_fn: called as `fn(src=state_dict, dst=module)` in place of loading the weights, with whole weights.

        Returns:
            (path of the checkpoint, the saved `client_state`); (None, None) when no tag was given and there is none.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the model; the engine is unchanged.
        """
        from onecopy.checkpoint.load import Loader, Wanted
        from onecopy.checkpoint.parts import common_tag, part_folder

        self._check_there_is_state()
        self.wait_for_checkpoint()
        runtime = cast("Engine", self).runtime
        if runtime.micro_batches == 0:
            runtime.before_window()  # what has been unfrozen takes its optimizer state from the checkpoint
        if self._loader is None:
            self._loader = Loader(cast("Engine", self))
        wanted = Wanted(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        )
        load_dir = part_folder(self.model_parallel, load_dir)
        return self._loader.load(load_dir, common_tag(self.model_parallel, load_dir, tag), wanted)

    def _check_there_is_state(self) -> None:
        engine = cast("Engine", self)
        if engine._destroyed:
            raise ModelError(
                "the engine has been destroyed and holds no state; save before destroy(), or initialize anew"
            )
        engine._check_states_are_here()
        engine.live.look(engine.units)

    def _keep_what_moves(self) -> None:
        """A save in the middle of the window that begins now goes back to here; windows of one micro-batch have no middle."""
        engine = cast("Engine", self)
        if engine.window.steps > 1:
            engine.moving.keep()
        else:
            engine.moving.forget()

    def wait_for_checkpoint(self) -> None:
        """Return when an asynchronous save is complete; raise what it failed with. Not collective."""
        if self._saver is not None:
            self._saver.wait()

    def _checkpoint_saver(self) -> Saver:
        from onecopy.checkpoint.save import Saver

        if self._saver is None:
            self._saver = Saver(cast("Engine", self))
        return self._saver

    # --------------------------------------------------------------------------------------------------------- weights
    def save_16bit_model(
        self, save_dir: Folder, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights in the dtype they are computed in, every rank its ranges; no rank holds the whole model.

        A name that ends in ".safetensors" (or `checkpoint.export_format: "safetensors"`) writes safetensors, above 5 GB in
        shards with an index.

        Returns:
            True; False, with nothing written, at stage 3 without `stage3_gather_16bit_weights_on_model_save`.

        Raises:
            CheckpointError: on every rank, when files cannot be written, or when a rank did not call.
        """
        from onecopy.checkpoint.export import Exporter
        from onecopy.checkpoint.parts import part_folder

        self._check_there_is_state()
        if self._exporter is None:
            self._exporter = Exporter(cast("Engine", self))
        save_dir = part_folder(self.model_parallel, save_dir)
        return self._exporter.save_16bit(save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: Folder, save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """All weights in the dtype they are computed in, on rank 0's host; None on the other ranks."""
        from onecopy.checkpoint.export import consolidated

        self._check_there_is_state()
        return consolidated(cast("Engine", self), exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """As `_consolidated_16bit_state_dict`, at stage 3 only. Raises ValueError at other stages."""
        stage = cast("Engine", self).zero_optimization_stage()
        if stage != 3:
            raise ValueError(f"this function requires ZeRO-3 mode; zero_optimization.stage is {stage}")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own `state_dict`, without frozen parameters if asked. Not collective.

        At stage 3 the weights are elsewhere and this raises; `_consolidated_16bit_state_dict` gathers them.
        """
        module = cast("Engine", self).module
        state: dict[str, Any] = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for value in state.values():
            if isinstance(value, ReleasedEntry):
                value.clone()  # raises
        if exclude_frozen_parameters:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load `checkpoint["module"]` (or `checkpoint` itself), a dictionary of whole weights, at any stage.

        Every rank gives the dictionary and takes its own part of it; masters follow. `fetch_z3_params` and
        `z3_params_to_fetch` are accepted and change nothing; names in `allowed_missing_keys` may be missing although `strict`.
        """
        from onecopy.checkpoint.custom_load import load_whole_weights

        found = checkpoint.get("module", checkpoint)
        weights = found if isinstance(found, dict) else checkpoint
        missing = [name for name in allowed_missing_keys or () if name not in weights]
        load_whole_weights(cast("Engine", self), weights, strict, custom_load_fn, missing)
