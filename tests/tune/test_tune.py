"""A search measures, ends losers early, survives what fails, hangs or runs out of memory, and writes the best."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onecopy.cli.main import main
from onecopy.errors import OneCopyError
from onecopy.tune.page import page, table
from onecopy.tune.space import ACCUMULATION, BATCH, BUCKET, MICRO, PREFETCH, SLOTS, applied, space_of
from onecopy.tune.study import Limits, tune
from onecopy.tune.target import Target, target_for
from onecopy.tune.trial import Trial, run_trial

BASE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
}
RUN = {"kind": "run", "inputs": [[4, 8]], "parameters": 4_000_000}

# A run as its record shows it, without torch: 2 slots are slow, 3 fast, 4 fail, 6 hang, and micro-batch 8 needs too much memory.
PRETENDS = """
import json, sys, time
config = json.load(open(sys.argv[1]))
slots, micro = config["onecopy"].get("slots", 2), config["train_micro_batch_size_per_gpu"]
if micro > 4:
    sys.exit("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
if slots == 4:
    raise ValueError("four is not to be")
with open(config["onecopy"]["record"] + "/run_record.jsonl", "a") as file:
    say = lambda **line: (file.write(json.dumps(line) + "\\n"), file.flush())
    say(kind="run", inputs=[[micro, 8]], parameters=4_000_000)
    for step in range(1, 30):
        time.sleep(60 if slots == 6 else 0.2 if slots == 2 else 0.02)  # a loser must be seen before it has done its steps
        seconds = (0.5 if slots == 2 else 0.1) * (1 + 1 / micro)
        say(kind="step", step=step, seconds=seconds, samples=config["train_batch_size"])
time.sleep(60)
"""


@pytest.fixture
def pretends(tmp_path: Path) -> Target:
    script = tmp_path / "pretends.py"
    script.write_text(PRETENDS)

    class Pretends(Target):
        def command(self, config: Path, folder: Path) -> list[str]:
            return [sys.executable, str(script), str(config)]

    return Pretends(BASE, ("",), 0)


def test_the_fastest_configuration_is_found_among_failures(pretends: Target, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    said: list[str] = []
    study = tune(pretends, 2, tmp_path / "out", Limits(trials=16, steps=4, timeout=4), said.append)
    assert study.best.choices[SLOTS] == 3 and study.config()["onecopy"]["slots"] == 3
    assert study.config()["train_batch_size"] == 16 and "record" not in study.config()["onecopy"]
    outcomes = {trial.status for trial in study.trials}
    assert {"measured", "slow", "failed", "out of memory"} <= outcomes
    assert any("four is not to be" in trial.detail for trial in study.trials if trial.status == "failed")
    lines = table(study).splitlines()
    heads, rows = lines[1], lines[2 : 2 + len(study.trials)]
    assert [len(row) for row in rows] == [len(heads)] * len(rows) and heads.split()[-1] == "micro-batch"
    assert rows[0].split()[0] == str(study.best.number) and any("four is not to be" in line for line in lines)
    assert "fastest" in table(study) and "<svg" in page(study, "toy") and "http" not in page(study, "toy")
    assert len(said) == len(study.trials) + 1


def test_a_run_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time, pathlib\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    trial = run_trial(Trial(1, {}), [sys.executable, "-c", script], tmp_path, 3, timeout=2)
    assert trial.status == "hung" and "2 seconds" in trial.detail
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not _runs(child):
            break
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_space_starts_at_five_hundred_million_and_works_down() -> None:
    space = space_of(BASE, 4_000_000, 2)
    assert space.values[BUCKET][:3] == (500_000_000, 1_000_000, 250_000)
    assert space.values[PREFETCH][-1] == 0
    assert set(space.values[MICRO]) == {4, 8, 2, 1}
    assert space_of(BASE, 4_000_000, 2, largest_micro=4).values[MICRO] == (4, 2, 1)
    assert set(space_of({**BASE, "zero_optimization": {"stage": 1}}, 4_000_000, 2).values) == {BUCKET, MICRO}
    assert MICRO not in space_of({**BASE, "train_micro_batch_size_per_gpu": "auto"}, 4_000_000, 2).values


def test_choices_keep_the_global_batch() -> None:
    changed = applied(BASE, {MICRO: 1, SLOTS: 4, BUCKET: 10}, 2)
    assert (changed[MICRO], changed[ACCUMULATION], changed[BATCH]) == (1, 8, 16)
    assert changed["onecopy"]["slots"] == 4 and changed["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 10}
    assert applied(BASE, {MICRO: 8}, 2, free_batch=True)[BATCH] == 32
    assert BASE["zero_optimization"] == {"stage": 3}


def test_the_configuration_is_replaced_where_the_script_names_it(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text("")
    config.write_text(json.dumps(BASE))
    for words in (
        ["--deepspeed_config", str(config)],
        [f"--config={config}", "--lr", "1"],
        ["--lr", "1", "--deepspeed", str(config)],
    ):
        command = target_for(str(script), 2, words).command(Path("/new.json"), tmp_path)
        assert str(config) not in " ".join(command) and "/new.json" in " ".join(command)
    assert target_for(str(script), 2, [], str(config)).command(Path("n.json"), tmp_path)[-2:] == [
        "--deepspeed_config",
        "n.json",
    ]
    command = target_for(str(config), 2, ["--layers", "2"]).command(Path("n.json"), tmp_path)
    assert command[3] == "train" and command[-4:-2] == ["--config", "n.json"] and "--layers" in command
    with pytest.raises(OneCopyError, match="name no configuration"):
        target_for(str(script), 2, ["--lr", "1"])
    with pytest.raises(OneCopyError, match="no file"):
        target_for("nowhere.py", 2)


def test_without_optuna_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", str(tmp_path / "ds.json")]) == 1
    assert "pip install 'onecopy[tune]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_search_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]))
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**BASE, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    text = tmp_path / "text.txt"
    text.write_text("a line of text to learn from\n" * 400)
    out = tmp_path / "out"
    words: list[Any] = [
        "tune",
        "--nproc",
        "2",
        "--trials",
        "3",
        "--steps",
        "3",
        "--folder",
        str(out),
        str(config),
        "--data",
        str(text),
    ]
    assert main([*words, "--layers", "2", "--width", "64"]) == 0
    trials = json.loads((out / "trials.json").read_text())
    assert len(trials) == 3 and trials[0]["status"] == "measured" and trials[0]["peak_bytes"] > 0
    assert json.loads((out / "best.json").read_text())["train_batch_size"] == 16
    assert (out / "tune.html").read_text().startswith("<!doctype html>")
