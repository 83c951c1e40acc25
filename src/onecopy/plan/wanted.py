"""What is to be planned: the user's own document, and what they said beside it, which counts first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onecopy.config import load
from onecopy.config.batch import MICRO, TRAIN, WINDOW
from onecopy.errors import PlanError
from onecopy.plan.estimate import CHECKPOINTING, Setting

STAGES = (0, 1, 2, 3)
PRECISIONS = ("bf16", "fp16", "fp32")
_BLOCKS = ("zero_optimization", "onecopy", "activation_checkpointing", "bf16", "bfloat16", "fp16", "optimizer")


def document_of(source: dict[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """The user's configuration, read; None where there is none.

    Raises:
        PlanError: it cannot be read, or a block of it is no block.
    """
    if source is None:
        return None
    content = _read(source) if isinstance(source, str | Path) else source
    for name in _BLOCKS:
        if name in content and not isinstance(content[name], dict):
            raise PlanError(f"{name} is {json.dumps(content[name])}; a plan needs it as a block, {{...}}")
    return content


def _read(file: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{file} cannot be read: {error.strerror}; give --config the path of a DeepSpeed-style JSON"
        ) from None
    except ValueError as error:
        raise PlanError(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise PlanError(
            f'{file} holds a {type(content).__name__}; a configuration is one JSON object, as {{"zero_optimization": ...}}'
        )
    return content


def stage_written(document: dict[str, Any] | None) -> int | None:
    """The stage in the document; None where it does not say."""
    stage = (document or {}).get("zero_optimization", {}).get("stage")
    return stage if isinstance(stage, int) else None


def setting_of(
    document: dict[str, Any] | None,
    ranks: int,
    stage: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    checkpointing: str | int | None = None,
    precision: str | None = None,
) -> Setting:
    """The setting to plan for `ranks` GPUs: each argument that is not None, else what the document says, else a default.

    With one of `micro_batch` and `accumulation` given, the other keeps the document's `train_batch_size`.

    Raises:
        PlanError, ConfigError: a value does not exist, or the batch sizes cannot be.
    """
    own = (document or {}).get("onecopy", {})
    chosen = stage if stage is not None else stage_written(document)
    if chosen not in (*STAGES, None):
        raise PlanError(f"stage {chosen} does not exist; choose 0, 1, 2 or 3")
    how = checkpointing if checkpointing is not None else own.get("checkpoint_activations", "none")
    if how not in CHECKPOINTING and not (isinstance(how, int) and how >= 1):
        raise PlanError(
            f"checkpointing '{how}' is unknown; choose {', '.join(CHECKPOINTING)}, or n for every n-th block"
        )
    kind = precision if precision is not None else _precision_written(document)
    if kind not in PRECISIONS:
        raise PlanError(f"precision '{kind}' is unknown; choose bf16, fp16 or fp32")
    size, steps = _batch(document or {}, ranks, micro_batch, accumulation)
    slots = own.get("slots", 2)
    return Setting(3 if chosen is None else chosen, size, steps, how, kind, slots if isinstance(slots, int) else 2)


def _precision_written(document: dict[str, Any] | None) -> str:
    """What the document's blocks say; "auto" is left to a trainer's arguments, of which bf16 is the best guess."""
    if document is None:
        return "bf16"
    enabled = {
        "bf16": {"enabled": False} | document.get("bfloat16", {}) | document.get("bf16", {}),
        "fp16": {"enabled": False} | document.get("fp16", {}),
    }
    for value in (True, "auto"):
        for kind, block in enabled.items():
            if block["enabled"] == value:
                return kind
    return "fp32"


def _batch(document: dict[str, Any], ranks: int, micro_batch: int | None, accumulation: int | None) -> tuple[int, int]:
    """(micro-batch, accumulation), by the rules of the configuration."""
    written = {name: document[name] for name in (TRAIN, MICRO, WINDOW) if document.get(name) not in (None, "auto")}
    given = {name: value for name, value in ((MICRO, micro_batch), (WINDOW, accumulation)) if value is not None}
    # What was not given follows, from the global batch or, without room for it, from the document.
    if given and TRAIN in written:
        for name in (MICRO, WINDOW) if len(given) == 1 else (TRAIN,):
            written.pop(name, None)
    written |= given
    if TRAIN not in written and MICRO not in written:
        written[MICRO] = 1
    resolved = load(written, ranks)
    return resolved.train_micro_batch_size_per_gpu, resolved.gradient_accumulation_steps
