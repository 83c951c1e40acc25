"""PEFT's LoRA and TRL's SFTTrainer at stages 1 to 3 on two ranks: losses, saved adapters and models as without onecopy."""

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


def run(folder: Path, *stages: str) -> dict[str, dict[str, Any]]:
    """What rank 0 printed, by stage; "plain" is DDP on the same ranks."""
    text = f"import runpy, sys; sys.path.insert(1, {str(ROOT)!r}); runpy.run_path({str(RUNS)!r}, run_name='__main__')"
    (folder / "script.py").write_text(text)
    command = ("-m", "onecopy", "run", "--nproc", "2", "--force", "script.py", *stages)
    done = run_python(*command, folder=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)]
    return {each["stage"]: each for each in found}


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in "12"), "3"])
def test_adapters_and_sft_train_save_resume_and_merge(stage: str, tmp_path: Path) -> None:
    found = run(tmp_path, "plain", stage)
    plain, ours = found["plain"]["adapters"], found[stage]["adapters"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["resumed"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["on bf16"] == pytest.approx(plain["on bf16"], rel=1e-5)
    assert len(ours["saved"]) == 8 and ours["checkpoint"] == ours["saved"]
    assert ours["saved"] == pytest.approx(plain["saved"], rel=1e-5)
    assert ours["opened"] == pytest.approx(plain["opened"], rel=1e-5)
    assert ours["merged"] == pytest.approx(plain["opened"], rel=1e-5)
    for name in ("sft", "sft adapters", "sft head"):
        assert found[stage][name]["losses"] == pytest.approx(found["plain"][name]["losses"], rel=1e-5)
        assert found[stage][name]["saved"] == pytest.approx(found["plain"][name]["saved"], rel=1e-5)
        assert found[stage][name].get("resumed") in (None, found[stage][name]["losses"])
