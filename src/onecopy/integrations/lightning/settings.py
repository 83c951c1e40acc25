"""From what Lightning was told (precision, accumulation, clipping) and the user's JSON to one configuration.

What is said in both places must agree: all differences are listed in one error. Nothing here needs Lightning.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from onecopy.config.sources import read_source
from onecopy.errors import ConfigError

DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
"""Compute dtype by Lightning's name of a precision; masters are fp32 for all of them."""

DEFAULT_STAGE = 2
UNSAID = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
"""What holds when neither Lightning nor the configuration says it: as in Lightning, no clipping."""


def document(source: Any, stage: int | None) -> dict[str, Any]:
    """A copy of the user's configuration (a dictionary, a path, base64, or None) with the stage in it.

    Raises:
        ConfigError: the stage is given twice and differs.
    """
    given = {} if source is None else read_source(source)
    found: dict[str, Any] = deepcopy(dict(given))
    zero = found.get("zero_optimization")
    if not isinstance(zero, dict):
        found["zero_optimization"] = zero = {} if zero is None else {"stage": int(bool(zero))}
    written = zero.get("stage")
    if written in (None, "auto"):
        zero["stage"] = DEFAULT_STAGE if stage is None else stage
    elif stage is not None and int(written) != stage:
        raise ConfigError(
            f"the strategy is given stage={stage}, and the configuration zero_optimization.stage {written}"
        )
    return found


def compute_dtype(found: dict[str, Any], precision: str) -> torch.dtype:
    """The dtype inputs are cast to: the configuration's, or that of Lightning's precision.

    Raises:
        ConfigError: the precision is unknown to the engine, or the configuration says another.
    """
    if precision not in DTYPES:
        raise ConfigError(f'precision="{precision}" is not supported; choose one of {", ".join(DTYPES)}')
    wanted = DTYPES[precision]
    bf16 = found.get("bf16", found.get("bfloat16"))
    for name, block, dtype in (("bf16", bf16, torch.bfloat16), ("fp16", found.get("fp16"), torch.float16)):
        if not isinstance(block, dict) or block.get("enabled", False) == "auto":
            continue
        if block.get("enabled", False) is False and wanted is dtype:
            raise ConfigError(f'precision="{precision}" is given, and the configuration has {name}.enabled false')
        if block.get("enabled", False) is True:
            if wanted not in (torch.float32, dtype):
                raise ConfigError(f'precision="{precision}" is given, and the configuration enables {name}')
            return dtype
    return wanted


def complete(found: dict[str, Any], precision: str, said: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """The configuration of the engine.

    Args:
        found: what `document` gave.
        said: what Lightning was told, by key of the configuration; None where it was not told.
        micro_batch: samples of a rank's batch, for counting samples.

    Raises:
        ConfigError: lists every key on which Lightning and the configuration differ.
    """
    result = deepcopy(found)
    dtype = compute_dtype(found, precision)
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        block = result.get(name)
        if (
            dtype is kind
            and not (isinstance(block, dict) and block.get("enabled") is True)
            and "bfloat16" not in result
        ):
            result[name] = {**(block or {}), "enabled": True}
        elif dtype is not kind and isinstance(block, dict) and block.get("enabled") == "auto":
            result[name] = {**block, "enabled": False}
    differences = []
    for key, value in said.items():
        written = result.get(key)
        if written in (None, "auto"):
            result[key] = UNSAID[key] if value is None else value
        elif value is not None and float(written) != float(value):
            differences.append(f"{key} is {written} in the configuration and {value} in Lightning")
    if differences:
        raise ConfigError("; ".join(differences) + "; leave it out of the configuration")
    if result.get("train_batch_size") in (None, "auto"):
        result.pop("train_batch_size", None)
        if result.get("train_micro_batch_size_per_gpu") in (None, "auto"):
            result["train_micro_batch_size_per_gpu"] = micro_batch
    result["managed_gradient_accumulation"] = False  # Lightning calls step() at boundaries only
    return result


def for_inference(found: dict[str, Any]) -> dict[str, Any]:
    """The configuration without what only training needs."""
    return {key: value for key, value in found.items() if key not in ("optimizer", "scheduler")}
