"""How far plans are from published runs: step time, calibrated on some models and judged on others, beside one constant.

    python -m benchmarks.plan                    the tables
    python -m benchmarks.plan --fit              also fit the rates of `onecopy.plan.timing.CALIBRATED` anew
    python -m benchmarks.plan --runs OTHER.csv   other runs, of the same columns

The runs are public (sources in `benchmarks/data/published_runs.csv`), of other engines than this one: FSDP gathers and
reduces the same bytes. Rows of models named in `CALIBRATION` fit the rates; all others are only judged. The last table is
of other programs and GPUs, none of which fitted anything.
"""

from __future__ import annotations

import argparse
import csv
import pickle
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

from benchmarks.launch import table
from benchmarks.published import Row, document, is_compiled, node_network, stage_of, subject
from onecopy.errors import PlanError
from onecopy.plan.estimate import Estimator, Setting
from onecopy.plan.hardware import Machine, known_gpus
from onecopy.plan.timing import Rates, rates_for

HERE = Path(__file__).parent
CALIBRATION = ("MPT-350m", "MPT-3b", "MPT-70b")
GPUS = {"H100": "h100-sxm-80gb", "A100-80": "a100-sxm-80gb", "A100-40": "a100-sxm-40gb"}


RUNS = HERE / "data" / "published_runs.csv"


def published(runs: Path = RUNS) -> Iterator[Row]:
    """Runs that a plan can be made for."""
    with open(runs, encoding="utf-8") as file:
        yield from (row for row in csv.DictReader(file) if not unplannable(row))


def unplannable(row: Row) -> str:
    """Why no plan can be made for a row, "" where one can."""
    unknown = [name for name in ("layers", "hidden", "vocab", "seq", "micro_batch", "n_gpus") if not row[name]]
    kind = row["parallelism"]
    if row["suspect"] != "no":
        return "marked as suspect"
    if not (kind in ("FSDP", "ZeRO", "HSDP", "single", "DP8 TP1 PP1") or kind[4:].isdigit()):
        return "tensor, pipeline or context parallel, or not said"
    if "fp8" in row["precision"]:
        return "8-bit precision"
    if unknown:
        return f"{', '.join(unknown)} not published"
    try:
        subject(row)
    except PlanError as error:
        return str(error)
    return ""


def rows(runs: Path = RUNS) -> list[Row]:
    """Those whose step time is published, on GPUs that the tables are about."""
    return [r for r in published(runs) if r["step_time_s"] and r["act_ckpt"] in ("none", "full") and gpu_of(r) in GPUS]


def others(runs: Path = RUNS) -> tuple[list[tuple[Row, str, float]], Counter[str]]:
    """(row, GPU, seconds a step) of the rest, and how many rows are left out by reason."""
    found, left = [], Counter[str]()
    with open(runs, encoding="utf-8") as file:
        left.update(why for row in csv.DictReader(file) if (why := unplannable(row)))
    for row in published(runs):
        gpu = GPUS.get(gpu_of(row) or "") or _in_table(row)
        if row["step_time_s"] and row["act_ckpt"] in ("none", "full") and gpu_of(row) in GPUS:
            continue
        if not gpu:
            left[f"GPU {row['gpu']} {row['gpu_mem_gb']} not known"] += 1
        elif row["parallelism"] == "HSDP" or row["offload"].startswith("CPU"):
            left["hybrid sharding or offload, which this engine has not"] += 1
        elif row["act_ckpt"] not in ("none", "full", "selective-op"):
            left[f"checkpointing '{row['act_ckpt']}' says not what is kept"] += 1
        elif row["tokens_s_gpu"]:
            found.append((row, gpu, float(row["micro_batch"]) * float(row["seq"]) / float(row["tokens_s_gpu"])))
        elif row["step_time_s"]:
            found.append((row, gpu, float(row["step_time_s"])))
        else:
            left["neither a step's time nor tokens per second published"] += 1
    return found, left


def _in_table(row: Row) -> str:
    """The table's name of a row's GPU, or of one that differs in its memory's size alone; "" where there is none."""
    kind, size = row["gpu"].lower(), f"{row['gpu_mem_gb']}gb"
    alike = [name for name in known_gpus() if name.rsplit("-", 1)[0] == kind]
    return next((name for name in alike if name.endswith(f"-{size}")), alike[0] if alike else "")


def gpu_of(row: Row) -> str | None:
    if row["gpu"].startswith("H100-SXM"):
        return "H100"
    return f"A100-{row['gpu_mem_gb']}" if row["gpu"] == "A100-SXM" and row["gpu_mem_gb"] in ("40", "80") else None


_estimators: dict[tuple[str, ...], Estimator] = {}


def key_of(row: Row) -> tuple[str, ...]:
    """Rows of one key share their rehearsals."""
    return row["model"], row["seq"], row["hidden"], row["framework"], str(document(row))


def predict(row: Row, rates: Rates, gpu: str = "") -> float:
    """Seconds of one optimizer step."""
    key = key_of(row)
    if key not in _estimators:
        _estimators[key] = Estimator(subject(row), 8, int(row["seq"]), document(row))
    one = known_gpus()[gpu or GPUS[gpu_of(row) or "H100"]]
    machine = Machine(replace(one, node_network=node_network(row) or one.node_network), int(row["n_gpus"]))
    size = int(float(row["micro_batch"]))
    steps = int(float(row["grad_accum"] or 0)) or max(1, int(float(row["global_batch"] or 0)) // (size * machine.count))
    precision = "fp16" if row["precision"] == "fp16" else "bf16"
    checkpointing = "none" if row["act_ckpt"] == "selective-op" else row["act_ckpt"]  # the subject recomputes by itself
    setting = Setting(stage_of(row), size, steps, checkpointing, precision, compiled=is_compiled(row))
    return _estimators[key].played(setting, machine, rates).seconds


def constant(row: Row, utilisation: float) -> float:
    """The baseline: the model's FLOPs at one utilisation of the peak (recomputation counted)."""
    tokens = float(row["seq"]) * float(row["global_batch"]) / float(row["n_gpus"])
    flops = 6 * float(row["params"]) + 12 * float(row["layers"]) * float(row["hidden"]) * float(row["seq"])
    again = 4 / 3 if row["act_ckpt"] == "full" else 1.0
    return tokens * flops * again / (known_gpus()[GPUS[gpu_of(row) or "H100"]].flops * utilisation)


def errors(chosen: list[Row], predicted: list[float]) -> tuple[float, float]:
    """(mean, worst) absolute relative error."""
    each = [abs(p / float(row["step_time_s"]) - 1) for row, p in zip(chosen, predicted, strict=True)]
    return statistics.mean(each), max(each)


def rank_correlation(first: list[float], second: list[float]) -> float:
    def ranks(values: list[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return sorted(range(len(values)), key=order.__getitem__)

    return statistics.correlation(ranks(first), ranks(second)) if len(first) > 1 else 1.0


BOUNDS = {
    "matmul": (0.2, 0.95), "half": (5.0, 100.0), "attention": (0.05, 0.95), "reduced": (0.05, 0.95),
    "overlap": (1.0, 1.3),  # 1.1-1.3 in Galvatron's measurements
}  # fmt: skip
START = {
    "H100": Rates(matmul=0.6, half=30, attention=0.2, reduced=0.3, overlap=1.1),
    "A100": Rates(matmul=0.72, half=30, attention=0.3, reduced=0.3, overlap=1.1),
}


def fit(chosen: list[Row], start: Rates) -> Rates:
    """Descent along one rate or two at a time, within bounds, on the mean error with a little of the worst."""

    def cost(rates: Rates) -> float:
        mean, worst = errors(chosen, [predict(row, rates) for row in chosen])
        return mean + 0.1 * worst

    best, best_cost, step = start, cost(start), 0.3
    while step > 0.01:
        before = best_cost
        for one, other in combinations_with_replacement(BOUNDS, 2):
            for first, second in product((1 + step, 1 / (1 + step)), repeat=2):
                moved = {
                    name: _scaled(name, getattr(best, name), factor) for name, factor in ((one, first), (other, second))
                }
                if all(BOUNDS[name][0] <= value <= BOUNDS[name][1] for name, value in moved.items()):
                    trial = replace(best, **moved)
                    now = cost(trial)
                    if now < best_cost:
                        best, best_cost = trial, now
        if best_cost > before - 1e-6:
            step /= 2
    return best


def _scaled(name: str, value: float, factor: float) -> float:
    return 1 + (value - 1 + 0.02) * factor if name == "overlap" else value * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--cache", help="a file that keeps the rehearsals between calls")
    parser.add_argument("--runs", type=Path, default=RUNS, help="a CSV of published runs (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.cache and Path(arguments.cache).exists():
        for key, shallow in pickle.loads(Path(arguments.cache).read_bytes()).items():
            row = next(r for r in published(arguments.runs) if key_of(r) == key)
            _estimators[key] = Estimator(subject(row), 8, int(row["seq"]), document(row))
            _estimators[key]._shallow = shallow
    everything = rows(arguments.runs)
    print(
        f"{'GPU':<8} {'rows':>5} {'set':<12} {'ours: mean':>10} {'worst':>7} {'rank':>6}   {'one constant: mean':>18} {'worst':>7}"
    )
    for name in GPUS:
        mine = [row for row in everything if gpu_of(row) == name]
        if not mine:
            continue
        fitted = [row for row in mine if row["model"] in CALIBRATION]
        rates = rates_for(known_gpus()[GPUS[name]])
        if arguments.fit:
            rates = fit(fitted, START[name.split("-")[0]])
            print(name, rates)
        known = fitted or [row for row in rows() if gpu_of(row) == name and row["model"] in CALIBRATION]
        ideal = [constant(row, 1.0) / float(row["step_time_s"]) for row in known]
        utilisation = statistics.median(ideal)
        for label, chosen in (
            ("calibration", fitted),
            ("held out", [row for row in mine if row not in fitted]),
            ("all", mine),
        ):
            if not chosen:
                continue
            ours = [predict(row, rates) for row in chosen]
            mean, worst = errors(chosen, ours)
            base_mean, base_worst = errors(chosen, [constant(row, utilisation) for row in chosen])
            rank = rank_correlation(ours, [float(row["step_time_s"]) for row in chosen])
            print(
                f"{name:<8} {len(chosen):>5} {label:<12} {mean:>10.1%} {worst:>7.1%} {rank:>6.3f}   {base_mean:>18.1%} {base_worst:>7.1%}"
            )
    lines = []
    judged, left = others(arguments.runs)
    for row, gpu, seconds in judged:
        mine = predict(row, rates_for(known_gpus()[gpu]), gpu)
        compiled = "yes" if is_compiled(row) else "no"
        lines.append([row["row_id"], row["framework"], row["model"], f"{row['n_gpus']} x {row['gpu']}", row["act_ckpt"], compiled,
                      f"{seconds:.2f}", f"{mine:.2f}", f"{mine / seconds - 1:+.0%}"])  # fmt: skip
    print(
        table(["row", "program", "model", "GPUs", "checkpointing", "compiled", "measured s", "plan s", "error"], lines)
    )
    print("left out:", *(f"{count:>5} rows: {why}" for why, count in left.most_common()), sep="\n")
    if arguments.cache:
        Path(arguments.cache).write_bytes(pickle.dumps({key: e._shallow for key, e in _estimators.items()}))


if __name__ == "__main__":
    main()
