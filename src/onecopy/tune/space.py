"""What is searched: buckets from 5e8 elements down, how far gathers run ahead, slots, the persistence threshold, the micro-batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

LARGEST_BUCKET = 500_000_000  # elements, DeepSpeed's default
BUCKET = "zero_optimization.reduce_bucket_size"
PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
PERSISTENCE = "zero_optimization.stage3_param_persistence_threshold"
SLOTS = "onecopy.slots"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
BATCH = "train_batch_size"
SHORT = {
    BUCKET: "reduce bucket",
    PREFETCH: "prefetch",
    SLOTS: "slots",
    PERSISTENCE: "persistence",
    MICRO: "micro-batch",
}
"""What the searched keys are called in a table."""


@dataclass(frozen=True)
class Space:
    """The values of each key path that a search may take, best guess first."""

    values: dict[str, tuple[Any, ...]]

    @property
    def size(self) -> int:
        """How many combinations there are."""
        size = 1
        for values in self.values.values():
            size *= len(values)
        return size

    def without(self, path: str) -> Space:
        """The space in which `path` stays as it is."""
        return Space({name: values for name, values in self.values.items() if name != path})


def space_of(
    document: dict[str, Any], parameters: int, ranks: int, free_batch: bool = False, largest_micro: int | None = None
) -> Space:
    """The space for a configuration of a model with so many parameters on so many ranks.

    Values with the same effect are left out: buckets above the model's size, and what only stage 3 reads below it. The
    global batch is kept, so that micro-batches are its divisors, unless `free_batch`.
    """
    zero = document.get("zero_optimization", {})
    values: dict[str, tuple[Any, ...]] = {BUCKET: _mine_first(zero.get("reduce_bucket_size"), _buckets(parameters))}
    if zero.get("stage") == 3:
        ahead = (*_buckets(parameters), 0)
        values[PREFETCH] = _mine_first(_either(zero, "stage3_prefetch_bucket_size", "prefetch_bucket_size"), ahead)
        values[SLOTS] = _mine_first(document.get("onecopy", {}).get("slots"), (2, 3, 4, 6))
        small = tuple(size for size in (0, 10_000, 100_000, 1_000_000) if size < parameters // 4)
        mine = _either(zero, "stage3_param_persistence_threshold", "param_persistence_threshold")
        values[PERSISTENCE] = _mine_first(mine, small)
    micro = batch_of(document, ranks)[0]
    if micro is not None:
        sizes = _micro_batches(document, ranks, free_batch)
        values[MICRO] = tuple(size for size in sizes if largest_micro is None or size <= max(largest_micro, micro))
    return Space({name: options for name, options in values.items() if len(options) > 1})


def batch_of(document: dict[str, Any], ranks: int) -> tuple[int | None, int]:
    """(micro-batch, accumulation) of a document; (None, 1) where the micro-batch is "auto" or cannot be known."""
    total, micro, steps = (document.get(name) for name in (BATCH, MICRO, ACCUMULATION))
    if "auto" in (total, micro, steps):
        return None, 1
    if micro is None and total is not None:
        micro = total // (ranks * (steps or 1))
    if micro is None:
        return None, 1
    return int(micro), int(steps or (total // (micro * ranks) if total else 1))


def _micro_batches(document: dict[str, Any], ranks: int, free_batch: bool) -> tuple[int, ...]:
    micro, steps = batch_of(document, ranks)
    assert micro is not None
    if free_batch:
        return (micro, micro * 2, micro * 4, *((micro // 2,) if micro > 1 else ()))
    share = micro * steps
    others = [size for size in range(share, 0, -1) if share % size == 0 and size != micro]
    return (micro, *sorted(others, key=lambda size: abs(size - micro))[:4])


def _buckets(parameters: int) -> tuple[int, ...]:
    """5e8, then a quarter of the model and less: everything at or above the model's size is one bucket."""
    smaller: list[int] = []
    size = min(LARGEST_BUCKET, parameters) // 4
    while len(smaller) < 4 and size >= 1000:
        smaller.append(size)
        size //= 4
    return (LARGEST_BUCKET, *smaller)


def _mine_first(mine: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(mine, int | float):
        return values
    return (int(mine), *(value for value in values if value != mine))


def _either(zero: dict[str, Any], *names: str) -> Any:
    return next((zero[name] for name in names if name in zero), None)


def applied(document: dict[str, Any], choices: dict[str, Any], ranks: int, free_batch: bool = False) -> dict[str, Any]:
    """The document with the choices in it; the accumulation follows the micro-batch, so that the global batch stays."""
    changed = copy.deepcopy(document)
    micro, steps = batch_of(document, ranks)
    for path, value in choices.items():
        *blocks, name = path.split(".")
        inner = changed
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner.pop(name.removeprefix("stage3_"), None)  # the same key's other name
        inner[name] = value
    if MICRO in choices and micro is not None:
        steps = steps if free_batch else micro * steps // choices[MICRO]
        changed[ACCUMULATION] = steps
        changed[BATCH] = choices[MICRO] * steps * ranks
    return changed
