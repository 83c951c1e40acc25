"""Published runs that nobody here has seen: judged where the row says enough, left out with a reason where it does not."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.judging import run_of
from benchmarks.plan import RUNS
from benchmarks.published import subject
from benchmarks.shapes import Unknown, known, shape_of, spelled
from onecopy.plan.estimate import Setting, sizes_of

pytest.importorskip("transformers")

with open(RUNS, encoding="utf-8") as file:
    COLUMNS = next(csv.reader(file))
OPT = {
    "row_id": "1", "model": "facebook/opt-125m", "seq": "128", "micro_batch": "2", "precision": "fp16", "gpu": "V100-SXM",
    "gpu_mem_gb": "16", "n_gpus": "4", "framework": "DeepSpeed",
    "parallelism": "ZeRO", "zero_stage": "2", "act_ckpt": "none", "fits": "yes", "suspect": "no",
}  # fmt: skip


def row(**said: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | OPT | said


def test_a_name_is_known_however_it_is_spelled() -> None:
    for name in ("meta-llama/Llama-2-7b-hf", "LLaMA 2 7B", "llama2-7b"):
        assert spelled(name) == ("llama2", "7b")
    for name, parameters in (
        ("Mistral-7B-v0.1", 7.24e9),
        ("EleutherAI/pythia-1.4b", 1.41e9),
        ("falcon-7b", 6.92e9),
        ("Qwen2.5-0.5B", 0.494e9),
    ):
        assert sizes_of(subject(row(model=name, params=str(parameters))))[0] == pytest.approx(parameters, rel=0.01)
    assert len(known()) > 100
    shape = shape_of(row(model="Llama-4.2B", params="4.2e9", layers="32", hidden="3072", heads="24", vocab="32000"))
    assert shape is not None and 6000 < shape["intermediate_size"] < 10_000  # so that it has so many parameters


def test_what_a_row_says_is_the_setting() -> None:
    run = run_of(
        row(grad_accum="8", mem_per_gpu="9.5", mem_unit="GB", mem_metric="max_memory_allocated", act_ckpt="every 2")
    )
    assert (run.setting, run.ranks, run.level, run.peak) == (Setting(2, 2, 2, 2, "fp16"), 4, "allocated", 9.5e9)
    assert run.fits and run.capacity == pytest.approx(15.84 * 2**30) and not run.pure
    pure = run_of(row(precision="bf16-true", parallelism="FSDP", zero_stage="", gpu="H200", gpu_mem_gb="141"))
    assert pure.pure and pure.setting.stage == 3 and pure.capacity == 141e9


@pytest.mark.slow
def test_pure_runs_have_half_the_states() -> None:
    mixed, half = run_of(row(precision="bf16", zero_stage="3")), run_of(row(precision="bf16/PURE", zero_stage="3"))
    state = half.estimator().state(half.setting)
    assert mixed.states_in_16_bits(mixed.estimator()) == 0
    assert half.states_in_16_bits(half.estimator()) == state["masters"] // 2 + state["moments"] // 2


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"parallelism": "zero1(dp2)+tp2+pp4"}, "tensor, pipeline"),
        ({"parallelism": "HSDP"}, "hybrid"),
        ({"precision": "fp8+compile"}, "precision"),
        ({"micro_batch": "auto"}, "micro-batch is not stated"),
        ({"seq": ""}, "tokens a sample is not stated"),
        ({"act_ckpt": "see config"}, "not known"),
        ({"notes": "QLoRA, 4 bits"}, "not Adam in full"),
        ({"offload": "CPU"}, "offload"),
        ({"zero_stage": "", "parallelism": "data"}, "stage is not stated"),
    ],
)
def test_rows_that_cannot_be_judged_say_why(said: dict[str, str], reason: str) -> None:
    with pytest.raises(Unknown, match=reason):
        run_of(row(**said))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"model": "Wunder-12B"}, "no known model"),
        ({"params": "9e9"}, "the row says 9.00e9"),
        ({"layers": "40"}, "has 12 blocks"),
        ({"model": "Falcon-99B", "layers": "9"}, "size of Falcon-99B is not known"),
        ({"model": "GPT-x", "layers": "2", "hidden": "100", "heads": "7", "vocab": "99"}, "not shared equally"),
    ],
)
def test_models_that_are_not_known_say_why(said: dict[str, str], reason: str) -> None:
    with pytest.raises(Unknown, match=reason):
        subject(row(**said))


@pytest.mark.slow
def test_a_table_of_others_is_judged_to_its_end(tmp_path: Path) -> None:
    table = [
        row(),
        row(row_id="2", mem_per_gpu="0.9", mem_unit="GiB"),
        row(row_id="3", model="Wunder-12B"),
        row(row_id="4", gpu="TPU", gpu_mem_gb=""),
    ]
    with open(tmp_path / "other.csv", "w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--runs", str(tmp_path / "other.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "bound too low: 0 of 1" in done.stdout and "runs that fitted: 0 of 2" in done.stdout
    assert "left out: Wunder-12B is no known model" in done.stdout and "row 3" in done.stdout
