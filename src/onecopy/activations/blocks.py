"""Wrap the forwards of a model's blocks: computed again in backward, compiled, or both.

What is replaced is a block's `forward`, inside its hooks: the engine gathers a block before and releases it after, so a
recomputation or a compiled graph sees weights that are in place, and no collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from onecopy.activations.checkpoint import call
from onecopy.activations.compiled import Compilation
from onecopy.errors import ModelError
from onecopy.observe.log import note

Forward = Callable[..., Any]


@dataclass
class Block:
    """A block with the forward it came with.

    Attributes:
        replaced: the instance had a `forward` of its own, which must be put back rather than taken off.
        repeats: it is one of the model's repeated blocks, and no layer that is only compiled for want of them.
    """

    name: str
    module: nn.Module
    forward: Forward
    replaced: bool
    repeats: bool = True

    @classmethod
    def of(cls, name: str, module: nn.Module, repeats: bool = True) -> Block:
        return cls(name, module, module.forward, "forward" in vars(module), repeats)


@dataclass
class Blocks:
    """The blocks of one model, and how they are wrapped now."""

    all: list[Block]
    checkpointed: set[str] = field(default_factory=set)
    selective: bool = False
    compiled: dict[str, Compilation] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Module]]) -> Blocks:
        """From the modules of units; a single layer of torch's is no block: it keeps nothing but its input anyway."""
        blocks = [
            Block.of(name, module)
            for name, module in named
            if any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
        ]
        return cls(blocks)

    def take_layers(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """For a model without blocks: its units are compiled, single layers though they are."""
        note(
            "engine.compile found no repeated block, and compiles single layers; name the classes of blocks in onecopy.unit_classes"
        )
        self.all.extend(Block.of(name, module, repeats=False) for name, module in named)

    def checkpoint(self, how: str | int) -> None:
        """Compute blocks again in backward: "full" (every block), "selective" (but keep matrix products), every n-th, "none".

        Raises:
            ModelError: there is no block, a block checkpoints itself already, or `how` is none of these.
        """
        self.checkpointed = {block.name for block in self._chosen(how)}
        self.selective = how == "selective"
        for block in self.all:
            if block.name in self.checkpointed and _checkpoints_itself(block.module):
                raise ModelError(
                    f"block '{block.name}' checkpoints itself already; call the model's gradient_checkpointing_disable() first"
                )
        self._wrap()

    def _chosen(self, how: str | int) -> list[Block]:
        if how == "none":
            return []
        blocks = [block for block in self.all if block.repeats]
        if not blocks:
            raise ModelError(
                "checkpoint_activations found no repeated block in the model; name its classes in onecopy.unit_classes"
            )
        if how in ("full", "selective"):
            return blocks
        if isinstance(how, int) and not isinstance(how, bool) and how >= 1:
            return blocks[::how]
        raise ModelError(
            f'checkpoint_activations({how!r}): give "full", "selective", "none" or n >= 1 for every n-th block'
        )

    def compile(self, compilation: Compilation, inside: nn.Module | None = None) -> None:
        """Compile every block's forward; or of `inside` only: the blocks in it, or itself where it is part of a block."""
        members = None if inside is None else {id(module) for module in inside.modules()}
        chosen = [block for block in self.all if members is None or id(block.module) in members]
        if inside is not None and not chosen:
            inside.forward = compilation.compiled(type(inside).__name__, inside.forward)  # type: ignore[method-assign]
        self.compiled.update({block.name: compilation for block in chosen})
        self._wrap()

    def _wrap(self) -> None:
        for block in self.all:
            forward = block.forward
            inside = self.selective  # what to keep is decided by operation, and a compiled graph shows none
            if block.name in self.checkpointed and inside:
                forward = _checkpointed(forward, {"context_fn": _keep_products})
            if block.name in self.compiled:
                forward = self.compiled[block.name].compiled(block.name, forward)
            if block.name in self.checkpointed and not inside:
                forward = _checkpointed(forward, {})
            self._put(block, forward)

    @staticmethod
    def _put(block: Block, forward: Forward) -> None:
        if forward is not block.forward or block.replaced:
            block.module.forward = forward  # type: ignore[method-assign]
        else:
            vars(block.module).pop("forward", None)

    def unwrap(self) -> None:
        """Put every block's own forward back."""
        self.checkpointed, self.compiled = set(), {}
        self._wrap()


def _checkpointed(forward: Forward, options: dict[str, Any]) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return call(forward, args, kwargs, options)

    return run


def _checkpoints_itself(module: nn.Module) -> bool:
    """Whether Hugging Face's gradient checkpointing is on in the block."""
    return bool(getattr(module, "gradient_checkpointing", False))


# ---------------------------------------------------------------------------------------------------------- selective
def _packets(*names: str) -> set[Any]:
    return {getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)}


_KEPT = _packets(
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = getattr(operation, "overloadpacket", operation) in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)
