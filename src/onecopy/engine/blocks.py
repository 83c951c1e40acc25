"""The engine's methods that change how its blocks compute; `onecopy.activations` does the work, imported when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from onecopy.config import Config
from onecopy.errors import ModelError

if TYPE_CHECKING:
    from onecopy.activations.blocks import Blocks
    from onecopy.comm.model_parallel import ModelParallel
    from onecopy.engine.engine import Engine
    from onecopy.engine.precompiled import Found
    from onecopy.layout import Placement


class BlockMethods:
    """Mixed into the engine, before `nn.Module`, whose `compile` would compile the hooks too."""

    block_modules: Sequence[tuple[str, nn.Module]]
    configuration: Config
    placement: Placement
    _wrapped: Blocks | None = None

    def _blocks(self) -> Blocks:
        from onecopy.activations.blocks import Blocks

        if self._wrapped is None:
            self._wrapped = Blocks.of(self.block_modules)
        return self._wrapped

    def checkpoint_activations(self, how: str | int = "full") -> None:
        """Keep only the inputs of blocks in forward, and compute blocks again in backward. Not collective.

        Gradients stay the same bits. Inputs wait where the JSON block `activation_checkpointing` says. Between steps it
        can be called again; every rank must choose the same.

        Args:
            how: "full": every block; "selective": every block, but the results of matrix products and attention are kept;
                an integer n: every n-th block; "none": no block.

        Raises:
            ModelError: the model has no repeated blocks, checkpoints itself already, or `how` is something else.
        """
        self._blocks().checkpoint(how)

    def compile(  # type: ignore[override]
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile each block's forward by itself with `torch.compile`; gathering and reducing stay outside. Not collective.

        What is outside of blocks (embedding, head, loss) runs as it is; in a model without repeated blocks the layers that
        are gathered one by one are compiled. A block that cannot be compiled runs as it is too, and a warning says which
        and why.

        Args:
            backend: a name or function that `torch.compile` takes.
            compile_kwargs: further arguments of `torch.compile`.
            schedule: DeepCompile's passes; refused.
            compiled_autograd_enabled: refused.

        Raises:
            ModelError: something refused is asked for.
        """
        from onecopy.activations.compiled import Compilation

        if schedule is not None or compiled_autograd_enabled:
            raise ModelError(
                "engine.compile compiles blocks one by one: leave out schedule and compiled_autograd_enabled, which compile the "
                "backward with the collectives in it"
            )
        options = dict(compile_kwargs or {})
        if options.get("mode") in ("reduce-overhead", "max-autotune") and self.placement.parameters.sharded:
            raise ModelError(
                f"engine.compile: mode '{options['mode']}' records CUDA graphs, which expect each weight at one address, and at "
                "stage 3 blocks share slots; use the default mode or 'max-autotune-no-cudagraphs'"
            )
        blocks = self._blocks()
        if not blocks.all:
            blocks.take_layers(self.block_modules or [("the whole model", cast("Engine", self).module)])
        blocks.compile(Compilation.with_(backend, options))

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self._wrapped is not None and bool(self._wrapped.compiled)

    def _compile_again(self, found: Found) -> None:
        """Blocks (or parts of them) that were compiled before `initialize` are compiled again, inside the hooks."""
        from onecopy.activations.compiled import Compilation

        for module, how in found:
            self._blocks().compile(Compilation(how), module)

    def _set_up_activations(self, model_parallel: ModelParallel | None) -> None:
        """Put the JSON block in force where it is written, and checkpoint what `onecopy.checkpoint_activations` says."""
        block = self.configuration.activation_checkpointing
        written = any(
            finding.key_path.startswith("activation_checkpointing.") for finding in self.configuration.findings
        )
        if written:
            from onecopy.activations.settings import apply

            apply(block, model_parallel, owner=self)
        elif model_parallel is not None:
            from onecopy.activations.settings import know_ranks

            know_ranks(model_parallel, self)
        how = self.configuration.onecopy.checkpoint_activations
        if how != "none":
            self.checkpoint_activations(how)

    def _leave_blocks(self) -> None:
        """Put the blocks' own forwards back, and take the settings back."""
        if self._wrapped is not None:
            self._wrapped.unwrap()
        from onecopy.activations.settings import forget

        forget(self)
