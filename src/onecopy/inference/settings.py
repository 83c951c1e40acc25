"""What `init_inference` is told: DeepSpeed's keys, of which dtype, ZeRO and the checkpoint mean something here."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from onecopy.config.sources import read_source
from onecopy.errors import ConfigError

_DTYPES = {
    "fp16": torch.float16, "half": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16, "fp32": torch.float32, "float": torch.float32, "float32": torch.float32,
}  # fmt: skip
_SYNONYMS = {"tp": "tensor_parallel", "kernel_inject": "replace_with_kernel_inject", "ckpt": "checkpoint"}
_SYNONYMS |= {"max_tokens": "max_out_tokens", "min_tokens": "min_out_tokens", "injection_dict": "injection_policy"}
# Keys and DeepSpeed's defaults.
_DEFAULTS: dict[str, Any] = {
    "dtype": torch.float16,
    "tensor_parallel": {"tp_size": 1},
    "mp_size": 1,
    "replace_with_kernel_inject": False,
    "enable_cuda_graph": False,
    "zero": {},
    "checkpoint": None,
    "base_dir": "",
    "max_out_tokens": 1024,
    "min_out_tokens": 1,
    "injection_policy": None,
    "injection_policy_tuple": None,
    "replace_method": "auto",
    "return_tuple": True,
    "triangular_masking": True,
    "transposed_mode": False,
    "quant": {},
    "moe": {},
    "ep_size": 1,
    "moe_experts": [1],
    "moe_type": "standard",
    "training_mp_size": 1,
    "keep_module_on_host": False,
    "set_empty_params": False,
    "save_mp_checkpoint_path": None,
    "checkpoint_config": {},
    "use_triton": False,
    "triton_autotune": False,
    "mpu": None,
    "args": None,
}
_NO_SPLIT = "tensor parallelism is not in onecopy; leave it out, and ZeRO-3 shards every weight over the ranks"
_NO_KERNELS = "onecopy injects no kernels; leave it out, and the model computes with torch's own"
_NO_QUANTISATION = "quantised inference is not in onecopy; use dtype torch.bfloat16 or torch.float16"


@dataclass(frozen=True)
class InferenceSettings:
    """The settings that take effect.

    Attributes:
        dtype: what weights are kept and used in.
        zero: the `zero_optimization` block; stage 3 where it names none.
        checkpoint: a folder of `save_checkpoint`, or a safetensors file or folder; None to take the model's own weights.
    """

    dtype: torch.dtype = torch.float16
    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 3})
    checkpoint: str | None = None

    def document(self) -> dict[str, Any]:
        """The configuration of the engine underneath."""
        precision: dict[str, Any] = {}
        if self.dtype is not torch.float32:
            precision = {("fp16" if self.dtype is torch.float16 else "bf16"): {"enabled": True}}
        return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": self.zero, **precision}


def default_inference_config() -> dict[str, Any]:
    """DeepSpeed's keys with their defaults."""
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in _DEFAULTS.items()}


def read_settings(config: Any, keywords: dict[str, Any]) -> InferenceSettings:
    """Merge a configuration (a dictionary or the path of a JSON file) with keyword arguments, and check them.

    Raises:
        ValueError: a key is given twice with different values.
        ConfigError: a key is unknown, has a wrong value, or asks for what onecopy does not have; says what to do.
    """
    merged = {} if config is None else dict(read_source(config))
    for name, value in keywords.items():
        if name in merged and merged[name] != value:
            raise ValueError(
                f"init_inference is given '{name}' twice, as {merged[name]!r} in the configuration and {value!r} as an argument; "
                "leave one out"
            )
        merged[name] = value
    values: dict[str, Any] = {}
    for name, value in merged.items():
        key = _SYNONYMS.get(name, name)
        if key not in _DEFAULTS:
            near = difflib.get_close_matches(key, [*_DEFAULTS, *_SYNONYMS], 1)
            raise ConfigError(f"init_inference knows no '{name}'{f'; did you mean {near[0]!r}?' if near else ''}")
        if key in values:
            raise ConfigError(f"init_inference is given '{key}' under two names; keep one")
        values[key] = value
    _refuse(values)
    zero = values.get("zero") or {}
    if not isinstance(zero, dict):
        raise ConfigError(
            f"init_inference's 'zero' is {zero!r}; give a zero_optimization block, such as {{'stage': 3}}"
        )
    return InferenceSettings(_dtype(values.get("dtype", torch.float16)), {"stage": 3, **zero}, _checkpoint(values))


def _refuse(values: dict[str, Any]) -> None:
    """Raise ConfigError for what is asked for and not there."""
    parallel = values.get("tensor_parallel") or {}
    size = parallel.get("tp_size", 1) if isinstance(parallel, dict) else getattr(parallel, "tp_size", parallel)
    asked = {
        "tensor_parallel.tp_size": (size, size not in (None, 1), _NO_SPLIT),
        "mp_size": (values.get("mp_size"), values.get("mp_size") not in (None, 1), _NO_SPLIT),
        "injection_policy": (values.get("injection_policy"), bool(values.get("injection_policy")), _NO_SPLIT),
        "quant": (values.get("quant"), _enabled(values.get("quant")), _NO_QUANTISATION),
        "ep_size": (
            values.get("ep_size"),
            values.get("ep_size") not in (None, 1),
            "expert parallelism is not in onecopy",
        ),
        "checkpoint": (
            values.get("checkpoint"),
            isinstance(values.get("checkpoint"), dict),
            "give the path of a folder",
        ),
    }
    for name in ("replace_with_kernel_inject", "use_triton", "enable_cuda_graph"):
        asked[name] = (values.get(name), bool(values.get(name)), _NO_KERNELS)
    for name in ("save_mp_checkpoint_path", "keep_module_on_host"):
        asked[name] = (
            values.get(name),
            bool(values.get(name)),
            "it belongs to tensor parallelism and kernels; leave it out",
        )
    for name, (value, refused, why) in asked.items():
        if refused:
            raise ConfigError(f"init_inference({name}={value!r}) is refused: {why}")


def _enabled(quant: Any) -> bool:
    """DeepSpeed's block is on as soon as one of its parts is."""
    if not isinstance(quant, dict):
        return bool(quant)
    return any(
        value is True if name == "enabled" else _enabled(value)
        for name, value in quant.items()
        if isinstance(value, bool | dict)
    )


def _dtype(given: Any) -> torch.dtype:
    found = given if isinstance(given, torch.dtype) else _DTYPES.get(str(given).removeprefix("torch.").lower())
    if found in (torch.int8, torch.uint8) or str(given).removeprefix("torch.") == "int8":
        raise ConfigError(f"init_inference(dtype={given}) is refused: {_NO_QUANTISATION}")
    if found not in (torch.float16, torch.bfloat16, torch.float32):
        raise ConfigError(f"init_inference(dtype={given!r}): give torch.float16, torch.bfloat16 or torch.float32")
    return found


def _checkpoint(values: dict[str, Any]) -> str | None:
    path = values.get("checkpoint")
    if path is None:
        return None
    return os.path.join(values.get("base_dir") or "", os.fspath(path))
