"""`init_inference`: an engine that only computes, over weights sharded in the dtype they are used in."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onecopy.engine import Engine, initialize
from onecopy.errors import ModelError
from onecopy.inference.settings import InferenceSettings, read_settings
from onecopy.init.pretrained import load_pretrained
from onecopy.init.whole_weights import whole_weights


def init_inference(model: nn.Module | None = None, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Shard a model's weights over the ranks, for computing only. Collective.

    Args:
        model: with its weights; or built under `zero.Init`; or on the meta device, its weights then come from `checkpoint`.
        config: a dictionary or the path of a JSON file with DeepSpeed's keys of `init_inference`; `kwargs` are such keys.
            `dtype` (default float16), `zero` (a `zero_optimization` block; stage 3 unless it says otherwise) and
            `checkpoint` (a folder of `save_checkpoint`, or safetensors files) take effect.

    A rank holds its N-th of the weights in `dtype`, and a few slots.

    Raises:
        ValueError: `config` and `kwargs` contradict each other.
        ConfigError: something is asked for that onecopy does not have: tensor parallelism, injected kernels, quantisation.
        ModelError: the model cannot be sharded, or the checkpoint does not fit it.
    """
    settings = read_settings(config, kwargs)
    if isinstance(model, Engine | InferenceEngine):
        raise ModelError(
            f"init_inference was given an {type(model).__name__}; give the model itself (engine.module) of no engine"
        )
    assert isinstance(model, nn.Module), "init_inference needs model=, a torch.nn.Module"
    engine, *_ = initialize(model=model, config=settings.document())
    try:
        found = InferenceEngine(engine, settings)
        if settings.checkpoint is not None:
            found.load(settings.checkpoint)
    except BaseException:
        engine.destroy()
        raise
    return found


class InferenceEngine(nn.Module):
    """A model whose weights are sharded; calling it and generating with it are collective, without gradients.

    Attributes:
        module: the model; attributes not found here are looked up there.
        engine: what shards it.
        dtype: what weights are kept and used in.
    """

    def __init__(self, engine: Engine, settings: InferenceSettings) -> None:
        super().__init__()
        self.module = engine.module
        object.__setattr__(self, "engine", engine)  # not a submodule: its names would be the model's a second time
        self.settings = settings
        self.dtype = settings.dtype
        self.eval()

    engine: Engine

    @property
    def config(self) -> Any:
        """The model's own configuration where it has one, as generation code expects."""
        return getattr(self.module, "config", self.settings)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Collective."""
        return self.engine(*args, **kwargs)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`, with ranks that may stop at different lengths. Collective.

        A `generate` that takes `synced_gpus` (transformers') goes on on all ranks until the last has finished. For any
        other, the weights are whole on every rank meanwhile, and ranks run freely.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise ModelError(
                f"{type(self.module).__name__} has no generate; write the loop inside `with engine.whole_weights():`, where ranks "
                "may call the model as often as they like"
            )
        if not self.shares or "synced_gpus" in kwargs:
            return generate(*args, **kwargs)
        if "synced_gpus" in inspect.signature(generate).parameters:
            return generate(*args, synced_gpus=True, **kwargs)
        with self.whole_weights():
            return generate(*args, **kwargs)

    @property
    def shares(self) -> bool:
        """Whether a forward needs the other ranks."""
        return self.engine.placement.parameters.sharded and self.engine.communicator.world_size > 1

    @contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        """Inside, every rank holds all weights and calls the model alone. Entering and leaving are collective."""
        with whole_weights(self.engine):
            yield self.module

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take the weights of a folder of `save_checkpoint` (any stage and world size) or of safetensors files. Collective."""
        if not is_training_checkpoint(Path(path)):
            load_pretrained(self.engine, path)
            return
        found, _ = self.load_checkpoint(path)
        if found is None:
            raise ModelError(f"there is no complete checkpoint in {path}")

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: Any = None, load_module_strict: bool = True, **_: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """The weights of a checkpoint; see `Engine.load_checkpoint`. Collective."""
        return self.engine.load_checkpoint(load_dir, tag, load_module_strict, load_module_only=True)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by category; see `Engine.memory`. Not collective."""
        return self.engine.memory()

    def destroy(self) -> None:
        """Free the weights and leave the process groups. Collective."""
        self.engine.destroy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules["module"], name)


def is_training_checkpoint(path: Path) -> bool:
    """Whether the folder is one of `save_checkpoint`: one with tags, or a tag itself."""
    return path.is_dir() and (
        (path / "manifest.json").is_file() or (path / "latest").is_file() or any(path.glob("*/manifest.json"))
    )
