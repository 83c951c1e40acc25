"""PEFT's LoRA and TRL's SFTTrainer at stages 2 and 3 on two ranks: losses, saved adapters and models as without onecopy."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, run_python

MISSING = [name for name in ("transformers", "peft", "trl", "datasets") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")
RUNS = Path(__file__).with_name("adapter_runs.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 printed, by stage; "plain" is DDP on the same ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    text = f"import runpy, sys; sys.path.insert(1, {str(ROOT)!r}); runpy.run_path({str(RUNS)!r}, run_name='__main__')"
    (folder / "script.py").write_text(text)
    command = ("-m", "onecopy", "run", "--nproc", "2", "--force", "script.py", "plain", "2", "3")
    done = run_python(*command, folder=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)]
    return {each["stage"]: each for each in found}


@pytest.mark.parametrize("stage", ["2", "3"])
def test_adapters_on_a_frozen_base_train_save_resume_and_merge(stage: str, runs: dict[str, dict[str, Any]]) -> None:
    plain, ours = runs["plain"]["adapters"], runs[stage]["adapters"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["resumed"] == pytest.approx(plain["losses"], rel=1e-5)
    assert len(ours["saved"]) == 8 and ours["checkpoint"] == ours["saved"]
    assert ours["saved"] == pytest.approx(plain["saved"], rel=1e-5)
    assert ours["opened"] == pytest.approx(plain["opened"], rel=1e-5)
    assert ours["merged"] == pytest.approx(plain["opened"], rel=1e-5)


@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("name", ["sft", "sft adapters"])
def test_sft_trainer_trains_and_saves(stage: str, name: str, runs: dict[str, dict[str, Any]]) -> None:
    plain, ours = runs["plain"][name], runs[stage][name]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["saved"] == pytest.approx(plain["saved"], rel=1e-5)
