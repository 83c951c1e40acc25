"""How often a plan's upper bound is too low, and how often a run that fitted is called a misfit, on published runs.

    python -m benchmarks.plan_memory
    python -m benchmarks.plan_memory --runs OTHER.csv   other runs, of the same columns

Rows with a known peak and neither tensor, pipeline nor context parallelism are few: torchtitan's Llama 3 8B (reserved) and
BigScience's 1.3B under ZeRO-1 (nvidia-smi). Runs that fitted are many; of pure 16-bit runs the plan's states are counted in 16 bits.
Published numbers above a GPU's peak or below the floor of the states are refused, and rows that say too little, or are of
what a plan does not know, are left out with the reason.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from benchmarks.judging import Run, run_of
from benchmarks.launch import table
from benchmarks.plan import RUNS, key_of
from benchmarks.published import fsdp_pools
from benchmarks.shapes import Row
from onecopy.errors import PlanError
from onecopy.plan.estimate import Estimator
from onecopy.plan.impossible import at_least, states_floor, utilisation
from onecopy.plan.unseen import GIB, Interval, intervals, unseen


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


class Judge:
    """Plans runs, those of one model with shared rehearsals."""

    def __init__(self) -> None:
        self._shallow: dict[Any, Any] = {}

    def bounds(self, run: Run) -> dict[str, Interval]:
        """The plan's intervals, with what the run's own engine reserves beside this one's."""
        estimator: Estimator = run.estimator()
        estimator._shallow = self._shallow.setdefault((key_of(run.row), run.pure), estimator._shallow)
        peak = estimator.peak(run.setting) - run.states_in_16_bits(estimator)
        parts = unseen(peak, run.ranks, gpu=run.row["gpu"])
        if "FSDP" in run.row["parallelism"]:
            parts.append(fsdp_pools(run.row, estimator, run.setting, run.pure))
        return intervals(peak, parts)


def judged(rows: list[Row]) -> tuple[list[tuple[Run, dict[str, Interval]]], dict[str, list[str]]]:
    """(runs with their intervals, reason to the rows that are left out for it)."""
    judge = Judge()
    found: list[tuple[Run, dict[str, Interval]]] = []
    left_out: dict[str, list[str]] = {}
    for row in rows:
        if not (row.get("mem_per_gpu") or row.get("fits")):
            continue
        try:
            run = run_of(row)
            found.append((run, judge.bounds(run)))
        except Exception as error:  # whatever a foreign row brings, the others are judged
            reason = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
            left_out.setdefault(reason, []).append(row.get("row_id", "?"))
    return found, left_out


def peaks(found: list[tuple[Run, dict[str, Interval]]]) -> str:
    """The table of runs whose peak is published."""
    lines, low = [], 0
    for run, levels in found:
        if run.peak is None:
            continue
        interval = levels[run.level]
        low += interval.bound < run.peak
        sizes = [f"{size / GIB:.1f}" for size in (run.peak, interval.guess, interval.bound)]
        row, states = run.row, "pure" if run.pure else run.setting.precision
        lines.append([row["row_id"], row["model"], run.setting.micro_batch, row["act_ckpt"], states, run.level, *sizes,
                      "too low" if interval.bound < run.peak else ""])  # fmt: skip
    heads = ["row", "model", "micro-batch", "checkpointing", "states", "level", "measured GiB", "guess", "bound", ""]
    return f"{table(heads, lines)}\nbound too low: {low} of {len(lines)}"


def fits(found: list[tuple[Run, dict[str, Interval]]], pure: bool) -> str:
    """How many that fitted are called misfits, and how many that did not are said to fit."""
    chosen = [(run, levels["device"].bound) for run, levels in found if run.pure == pure and run.capacity]
    lines = []
    for run, bound in chosen:
        assert run.capacity is not None
        if run.fits is True and bound > run.capacity:
            lines.append(
                f"misfit: row {run.row['row_id']} {run.row['model']} on {run.ranks}: {bound / GIB:.1f} of {run.capacity / GIB:.1f} GiB"
            )
        if run.fits is False and bound <= run.capacity:
            lines.append(
                f"said to fit: row {run.row['row_id']} {run.row['model']} on {run.ranks}: {bound / GIB:.1f} GiB"
            )
    for what, ran in (("called misfits, of runs that fitted", True), ("said to fit, of runs that did not", False)):
        wrong = sum(
            (run.capacity or 0) < bound if ran else bound <= (run.capacity or 0)
            for run, bound in chosen
            if run.fits is ran
        )
        lines.append(f"{what}: {wrong} of {sum(run.fits is ran for run, _ in chosen)}")
    return "\n".join([f"states in {'16 bits' if pure else 'mixed precision'}", *(f"  {line}" for line in lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="a CSV of published runs (default: %(default)s)")
    with open(parser.parse_args().runs, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    refused = {row["row_id"]: why for row in rows if (why := impossible(row))}
    print(f"refused: {len(refused)} published rows", *refused.values(), sep="\n  ")
    found, left_out = judged([row for row in rows if row.get("row_id") not in refused])
    print(peaks(found))
    print(fits(found, pure=False))
    print(fits(found, pure=True))
    for reason, names in left_out.items():
        print(f"left out: {reason}: row{'s' if len(names) > 1 else ''} {', '.join(names)}")


if __name__ == "__main__":
    main()
