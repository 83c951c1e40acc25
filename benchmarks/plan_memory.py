"""How often a plan's upper bound is too low, and how often a run that fitted is called a misfit, on published runs.

    python -m benchmarks.plan_memory

Rows with a known peak and neither tensor, pipeline nor context parallelism are few: torchtitan's Llama 3 8B (reserved) and
BigScience's 1.3B under ZeRO-1 (nvidia-smi). Runs that fitted are those of `benchmarks/plan.py` in mixed precision. Published
numbers above a GPU's peak or below the floor of the states are refused before anything is judged.
"""

from __future__ import annotations

import csv
from typing import Any

from benchmarks.launch import table
from benchmarks.plan import GPUS, HERE, gpu_of, key_of, rows
from benchmarks.published import Row, document, fsdp_pools, stage_of, subject
from onecopy.errors import PlanError
from onecopy.plan.estimate import Estimator, Setting
from onecopy.plan.hardware import known_gpus
from onecopy.plan.impossible import at_least, states_floor, utilisation
from onecopy.plan.unseen import GIB, Interval, intervals, unseen


def known_peaks() -> list[Row]:
    """Rows with a peak on one GPU that a plan can be made for."""
    with open(HERE / "data" / "published_runs.csv", encoding="utf-8") as file:
        found = [
            row
            for row in csv.DictReader(file)
            if row["mem_per_gpu"] and row["suspect"] == "no" and not row["offload"].startswith("CPU")
        ]
    return [row for row in found if row["parallelism"] in ("FSDP8", "DP8 TP1 PP1") and "fp8" not in row["precision"]]


def judged(row: Row) -> tuple[str, Interval]:
    """(what was measured, the plan's interval of it)."""
    torchtitan = row["parallelism"] == "FSDP8"
    at_once = int(row["micro_batch"]) * int(row["n_gpus"])
    several = 2 if float(row["global_batch"] or 0) > at_once else 1  # more than one micro-batch keeps gradients
    checkpointing = "none" if row["act_ckpt"] == "selective-op" else row["act_ckpt"]  # the subject recomputes by itself
    setting = Setting(stage_of(row), int(row["micro_batch"]), several, checkpointing, "bf16" if torchtitan else "fp16")
    estimator = Estimator(subject(row), int(row["n_gpus"]), int(row["seq"]), document(row))
    level = "reserved" if torchtitan else "device"
    return level, bounds(row, estimator, setting)[level]


def bounds(row: Row, estimator: Estimator, setting: Setting) -> dict[str, Interval]:
    """The plan's intervals, with what the row's own engine reserves beside this one's."""
    peak = estimator.peak(setting)
    parts = unseen(peak, estimator.world_size)
    if "FSDP" in row["parallelism"]:
        parts.append(fsdp_pools(row, estimator, setting))
    return intervals(peak, parts)


def impossible(row: Row) -> str:
    """Why a published row cannot be, or ""."""
    try:
        if (
            row["mem_per_gpu"]
            and row["zero_stage"]
            and row["parallelism"] in ("FSDP", "single", "ZeRO")
            and "bf16-true" not in row["precision"]
        ):
            unit = GIB if row["mem_unit"] == "GiB" else 1e9
            size = states_floor(float(row["params"]), int(row["zero_stage"]), int(row["n_gpus"]), (2.0, 0.0, 0.0))
            at_least(float(row["mem_per_gpu"]) * unit, size, f"row {row['row_id']}")
        if row["mfu_pct"]:
            utilisation(float(row["mfu_pct"]), 100.0, 1.0, f"row {row['row_id']}")
    except (PlanError, ValueError) as error:
        return str(error) if isinstance(error, PlanError) else ""
    return ""


def misfits() -> tuple[int, int]:
    """(runs that fitted and are called misfits, runs that fitted), of mixed-precision rows of 80 GB and 40 GB GPUs."""
    shared: dict[Any, Any] = {}
    called = count = 0
    for row in rows():
        if "amp" not in row["precision"].lower() or row["fits"] != "yes":
            continue
        world = int(row["n_gpus"])
        estimator = Estimator(subject(row), world, int(row["seq"]), document(row))
        estimator._shallow = shared.setdefault(key_of(row), estimator._shallow)
        setting = Setting(
            stage_of(row), int(float(row["micro_batch"])), int(float(row["grad_accum"] or 1)), row["act_ckpt"]
        )
        bound = bounds(row, estimator, setting)["device"].bound
        memory = known_gpus()[GPUS[gpu_of(row) or "H100"]].memory
        called, count = called + (bound > memory), count + 1
        if bound > memory:
            print(
                f"misfit: row {row['row_id']} {row['model']} on {world}: {bound / GIB:.1f} of {memory / GIB:.1f} GiB",
                flush=True,
            )
    return called, count


def main() -> None:
    with open(HERE / "data" / "published_runs.csv", encoding="utf-8") as file:
        refused = [found for found in map(impossible, csv.DictReader(file)) if found]
    print(f"refused: {len(refused)} published rows", *refused, sep="\n  ")
    lines, low = [], 0
    for row in known_peaks():
        level, interval = judged(row)
        measured = float(row["mem_per_gpu"])
        under = interval.bound / GIB < measured
        low += under
        lines.append([row["row_id"], row["model"], row["micro_batch"], row["act_ckpt"], level, measured, f"{interval.guess / GIB:.1f}",
                      f"{interval.bound / GIB:.1f}", "too low" if under else ""])  # fmt: skip
    print(table(["row", "model", "micro-batch", "checkpointing", "level", "measured GiB", "guess", "bound", ""], lines))
    print(f"bound too low: {low} of {len(lines)}", flush=True)
    called, count = misfits()
    print(f"called misfits: {called} of {count} runs that fitted")


if __name__ == "__main__":
    main()
