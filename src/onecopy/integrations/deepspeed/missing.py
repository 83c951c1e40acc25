"""Modules of DeepSpeed that are not in the tree: importing one raises `ModuleNotFoundError` with the reason."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# The longest prefix of the module's name decides; names are without "deepspeed.".
_REASONS = {
    "pipe": "pipeline parallelism is not in onecopy; ZeRO-3 shards the model's layers instead",
    "runtime.pipe": "pipeline parallelism is not in onecopy; ZeRO-3 shards the model's layers instead",
    "moe": "expert parallelism is not in onecopy; mark expert blocks with zero_optimization.leaf_module instead",
    "sequence": "sequence parallelism is not in onecopy; pass mpu= with the data-parallel group to initialize",
    "runtime.sequence_parallel": "sequence parallelism is not in onecopy; pass mpu= with the data-parallel group",
    "inference": "kernel injection and tensor-parallel inference are not in onecopy; call the model's own generate",
    "module_inject": "kernel injection is not in onecopy; call the model as it is",
    "compression": "compression is not in onecopy; DeepSpeed removed it from its configuration too",
    "linear": "use PEFT's LoRA layers; frozen weights are sharded like all others",
    "autotuning": "choose sizes with the numbers of engine.memory()",
    "runtime.hybrid_engine": "call generate inside zero.unwrap_model_for_generation(engine)",
    "runtime.data_pipeline": "there is no curriculum; give deepspeed_io a data_sampler",
    "runtime.swap_tensor": "offload is not in onecopy; spread the state over more ranks",
    "runtime.comm": "compressed communication is not in onecopy; communication_data_type chooses the dtype on the wire",
    "compile": "DeepCompile is not in onecopy; engine.compile() compiles block by block",
    "elasticity": "elastic batch sizes are not in onecopy; checkpoints load at any world size",
    "ops.aio": "offload to NVMe is not in onecopy; spread the state over more ranks",
    "ops.transformer": "transformer kernels are not in onecopy; torch's scaled_dot_product_attention is fused",
    "ops.sparse_attention": "sparse attention is not in onecopy; use torch.nn.attention.flex_attention",
    "model_implementations": "kernel injection is not in onecopy; call the model as it is",
    "launcher.launch": "start ranks with `onecopy run`, or with the deepspeed command under `onecopy exec`",
    "nvme": "offload to NVMe is not in onecopy; spread the state over more ranks",
    "checkpoint.ds_to_universal": "a onecopy checkpoint loads at any world size and stage as it is",
}


class MissingModules(importlib.abc.MetaPathFinder):
    """Asked last, when no file of the tree has the name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.partition("deepspeed.")[2]
        if not name or not fullname.startswith("deepspeed."):
            return None
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        reason = next((_REASONS[prefix] for prefix in prefixes if prefix in _REASONS), None)
        known = f": {reason}" if reason else "; docs/compatibility.md lists what it has"
        raise ModuleNotFoundError(f"onecopy's deepspeed has no module '{fullname}'{known}", name=fullname)


def refuse_missing_modules() -> None:
    """Ask `MissingModules` after all other finders. Repeatable."""
    if not any(isinstance(finder, MissingModules) for finder in sys.meta_path):
        sys.meta_path.append(MissingModules())
