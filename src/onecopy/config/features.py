"""What DeepSpeed's document may ask for and onecopy does not do: accepted while switched off, else refused."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from onecopy.config.diagnosis import Diagnosis

REFUSED = {
    "nebula": "the Nebula checkpoint service",
    "compression_training": "compression during training",
    "amp": "apex mixed precision; the bf16, fp16 and torch_autocast blocks replace it",
    "quantize_training": "quantization during training",
    "sparse_gradients": "sparse gradients",
    "eigenvalue": "eigenvalues of blocks",
    "sparse_attention": "sparse attention",
    "elasticity": "elastic batch sizes; checkpoints load at any world size",
    "graph_harvesting": "CUDA graph harvesting",
    "curriculum_learning": "curriculum learning",
    "progressive_layer_drop": "progressive layer dropping",
    "data_efficiency": "data sampling by curriculum",
    "weight_quantization": "quantized weights",
    "hybrid_engine": "the hybrid engine for generation in training",
    "tensor_parallel": "tensor parallelism",
    "expert_parallel": "expert parallelism",
    "datastates_ckpt": 'the DataStates checkpoint engine; "checkpoint": {"async": true} saves in the background',
    "compile": "DeepCompile",
    "msamp": "8-bit training with MS-AMP",
}
"""Top-level features that would change the training: what each one is, for "onecopy has no ..."."""

IGNORED = {
    "aio": "options of offloading to disk, which onecopy does not do",
    "timers": "wall_clock_breakdown prints onecopy's own timers",
    "pipeline": "options of pipeline modules, which onecopy does not have",
    "vocabulary_size": "only a hint about alignment",
    "log_level": "onecopy logs through Python's logging",
    "use_data_before_expert_parallelism": "an order of groups for expert parallelism, which onecopy does not have",
    "seq_parallel_communication_data_type": "concerns sequence parallelism, which onecopy does not have",
    "disable_allgather": "whole parameters are always refreshed by all-gathers",
    "disable_python_gc": "Python's garbage collector is left as it is",
    "zero_force_ds_cpu_optimizer": "concerns offloading, which onecopy does not do",
    "autotuning": "read by a tuner, not by a training run",
}
"""Top-level keys that cannot change a run's results: why each one has no effect."""

OBSERVERS = {
    "comms_logger": "the engine counts bytes and collectives itself: engine.communication()",
    "wandb": "onecopy writes to TensorBoard and CSV: use the tensorboard or csv_monitor block",
    "comet": "onecopy writes to TensorBoard and CSV: use the tensorboard or csv_monitor block",
}
"""Top-level blocks that only observe: ignored, with a warning when they are switched on."""

REMOVED_FROM_ZERO = {
    "mics_shard_size": "shards in groups of ranks (MiCS)",
    "mics_hierarchical_params_gather": "shards in groups of ranks (MiCS)",
    "zeropp_loco_param": "quantized gradients with error feedback (LoCo)",
}
"""Keys that `zero_optimization` had in earlier releases."""

_SIZES = ("tp_size", "autotp_size")


def switched_on(value: Any) -> bool:
    """Whether a feature's value asks for it: a true, a positive number, an enabled block, a block without a switch."""
    if value is None or value == "auto":
        return False
    if isinstance(value, numbers.Real):
        return float(value) > 0
    if not isinstance(value, Mapping):
        return bool(value)
    for switch in ("enabled", "deepcompile"):
        if switch in value:
            return switched_on(value[switch])
    if any(size in value for size in _SIZES):
        return any(isinstance(value.get(size), numbers.Real) and value[size] > 1 for size in _SIZES)
    inner = [one for one in value.values() if isinstance(one, Mapping)]
    if _has_switch(value):
        return any(switched_on(one) for one in inner if _has_switch(one))
    return bool(value)


def _has_switch(value: Mapping[Any, Any]) -> bool:
    """Whether an `enabled` is written anywhere in a block."""
    return "enabled" in value or any(isinstance(one, Mapping) and _has_switch(one) for one in value.values())


def read_feature(name: str, value: Any, path: str, diagnosis: Diagnosis) -> bool:
    """Record the verdict on a top-level key that is a known feature of DeepSpeed only. False when it is none."""
    if name in REFUSED:
        _refuse_if_on(REFUSED[name], value, path, diagnosis)
    elif name in IGNORED:
        diagnosis.judge(path, value, "ignored", IGNORED[name])
    elif name in OBSERVERS:
        diagnosis.judge(path, value, "ignored", OBSERVERS[name])
        warn_if_observing(name, value, path, diagnosis)
    else:
        return False
    return True


def warn_if_observing(name: str, value: Any, path: str, diagnosis: Diagnosis) -> None:
    """Warn that a monitor or profiler that is switched on writes nothing."""
    if switched_on(value):
        diagnosis.note(path, value, f"is switched on and has no effect; {OBSERVERS[name]}", warn=True)


def read_removed_from_zero(name: str, value: Any, path: str, diagnosis: Diagnosis) -> bool:
    """Record the verdict on a key that `zero_optimization` once had. False when it is none."""
    if name not in REMOVED_FROM_ZERO:
        return False
    _refuse_if_on(REMOVED_FROM_ZERO[name], value, path, diagnosis)
    return True


def _refuse_if_on(what: str, value: Any, path: str, diagnosis: Diagnosis) -> None:
    if switched_on(value):
        diagnosis.refuse(path, value, f"onecopy has no {what}; remove the key or switch it off")
    else:
        diagnosis.judge(path, value, "ignored", "switched off")
