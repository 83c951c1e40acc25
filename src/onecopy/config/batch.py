"""The batch-size triangle: train_batch_size = micro-batch x accumulation x world size, from any two or one of them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from onecopy.config.diagnosis import Diagnosis
from onecopy.config.kinds import Integer, Mismatch, show

TRAIN, MICRO, WINDOW = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
EFFECTS = {
    TRAIN: "samples of one optimizer step, over all ranks",
    MICRO: "samples of one micro-batch on one rank",
    WINDOW: "micro-batches of one optimizer step",
}


@dataclass(frozen=True, slots=True)
class WorldSize:
    """The number of ranks, and where it was read."""

    size: int
    source: str


def find_world_size(given: int | None, diagnosis: Diagnosis) -> WorldSize:
    """The world size: as given, else the process group's, else WORLD_SIZE's, else 1. Not a collective."""
    if given is not None:
        try:
            return WorldSize(_positive(given), "given")
        except Mismatch as mismatch:
            diagnosis.refuse("world_size", given, str(mismatch))
            return WorldSize(1, "assumed")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return WorldSize(distributed.get_world_size(), "the process group")
    text = os.environ.get("WORLD_SIZE")
    if text is None or not text.strip():
        return WorldSize(1, "no process group and no WORLD_SIZE, so one process")
    try:
        return WorldSize(_positive(int(text)), "environment variable WORLD_SIZE")
    except ValueError:
        diagnosis.refuse(
            "environment variable WORLD_SIZE", text, "must be an integer, at least 1; unset it or write one"
        )
        return WorldSize(1, "assumed")


def _positive(value: Any) -> int:
    size = Integer(1, unit="ranks").read(value)
    assert size is not None
    return size


def resolve(written: dict[str, Any], values: dict[str, int], world: WorldSize, diagnosis: Diagnosis) -> dict[str, int]:
    """The three batch sizes, all of them.

    `written` maps the keys in the document to their raw values; `values` to those that read as numbers. A key that was
    written but is not in `values` is "auto" or null (it is worked out from the others) or a problem already recorded.
    """
    if any(f"{name}" in diagnosis.verdicts and diagnosis.verdicts[name].verdict == "refused" for name in EFFECTS):
        return {TRAIN: world.size, MICRO: 1, WINDOW: 1}  # the error is raised in any case; these are only placeholders
    train, micro, window = values.get(TRAIN), values.get(MICRO), values.get(WINDOW)
    if train is None and micro is None:
        _refuse_no_batch(written, diagnosis)
        return {TRAIN: world.size * (window or 1), MICRO: 1, WINDOW: window or 1}
    if micro is not None:
        if window is None:
            window = 1 if train is None else _divide(train, micro * world.size)
        train = train if train is not None else micro * window * world.size
    else:
        assert train is not None
        window = window or 1
        micro = _divide(train, window * world.size)
    if train != micro * window * world.size:
        _refuse_product(values, world, diagnosis)
    result = {TRAIN: train, MICRO: micro, WINDOW: window}
    _record(result, written, values, world, diagnosis)
    return result


def _divide(whole: int, part: int) -> int:
    return max(whole // part, 1)


def _refuse_no_batch(written: dict[str, Any], diagnosis: Diagnosis) -> None:
    autos = [name for name in EFFECTS if written.get(name) == "auto"]
    if autos:
        diagnosis.refuse(
            autos[0],
            "auto",
            f'"auto" cannot be worked out for {", ".join(autos)}; write {MICRO}, or {TRAIN}, as an integer',
        )
    else:
        diagnosis.refuse(
            MICRO, None, f"neither {MICRO} nor {TRAIN} is written; write one of them as an integer, at least 1"
        )


def _refuse_product(values: dict[str, int], world: WorldSize, diagnosis: Diagnosis) -> None:
    """Say each number with its source, and the changes that would make the triangle close."""
    numbers = [f"{name} {values[name]} (written)" for name in (MICRO, WINDOW) if name in values]
    train, known = values[TRAIN], world.size
    for name in (MICRO, WINDOW):
        known *= values.get(name, 1)
    numbers.append(f"world size {world.size} ({world.source})")
    product = " x ".join(numbers)
    complete = MICRO in values and WINDOW in values
    if complete:
        fixes = [f"set {TRAIN} to {known}", f"remove one of {TRAIN}, {MICRO} and {WINDOW}"]
        without_world = values[MICRO] * values[WINDOW]
        if train % without_world == 0:
            fixes.append(f"run with world size {train // without_world}")
        message = f"{train} (written) is not {product} = {known}; "
    else:
        low, high = train // known * known, -(-train // known) * known
        options = [str(x) for x in (low, high) if x > 0]
        fixes = [f"set {TRAIN} to {' or '.join(options)}"]
        fixes += [f"run with a world size that divides it (this one: {world.source})"] if world.size > 1 else []
        message = f"{train} (written) cannot be divided by {product} = {known}; "
    diagnosis.refuse(TRAIN, train, message + "; or ".join(fixes))


def _record(
    result: dict[str, int], written: dict[str, Any], values: dict[str, int], world: WorldSize, diagnosis: Diagnosis
) -> None:
    product = f"{result[MICRO]} x {result[WINDOW]} x world size {world.size} ({world.source})"
    for name, value in result.items():
        if name in values:
            diagnosis.amend(name, "honoured", EFFECTS[name])
            continue
        raw = written.get(name)
        how = {
            TRAIN: f"= {product}",
            MICRO: f"= {result[TRAIN]} / {result[WINDOW]} / world size {world.size} ({world.source})",
            WINDOW: "the default"
            if TRAIN not in values or MICRO not in values
            else f"= {result[TRAIN]} / {result[MICRO]} / world size {world.size} ({world.source})",
        }[name]
        diagnosis.judge(name, value, "honoured", f"{EFFECTS[name]}; {how}", "auto" if raw == "auto" else "derived")
        if raw == "auto":
            diagnosis.note(name, raw, f'"auto" is {show(value)}: {how}')
