"""Lightning's own DeepSpeedStrategy under `onecopy run`, on two CPU ranks: what DDP gives, at stages 1 to 3."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

RUNS = str(Path(__file__).with_name("lightning_deepspeed.py"))
CLOSE: dict[str, Any] = {"rel": 1e-5, "abs": 1e-6}


def test_trainer_and_fabric_train_resume_evaluate_and_convert(tmp_path: Path) -> None:
    program = f"import runpy, sys; sys.path.insert(1, {str(Path(RUNS).parents[2])!r}); runpy.run_path({RUNS!r}, run_name='__main__')"
    (tmp_path / "script.py").write_text(program)
    done = run_python("-m", "onecopy", "run", "--nproc", "2", "--force", "script.py", folder=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    found = json.loads(line)
    plain = found["ddp"]
    for stage in "123":
        whole, resumed = found[stage]["whole"], found[stage]["resumed"]
        for name in ("losses", "weights", "metrics", "rates", "steps"):
            assert whole[name] == pytest.approx(plain[name], **CLOSE), (stage, name)
        assert resumed["losses"] == pytest.approx(whole["losses"][4:], **CLOSE)
        assert resumed["weights"] == pytest.approx(whole["weights"], **CLOSE)
        assert (resumed["rates"], resumed["steps"]) == (whole["rates"][4:], whole["steps"])
        assert found[stage]["after"]["test_loss"] == pytest.approx(plain["metrics"]["val_loss"], **CLOSE)
        assert found[stage]["validated"]["val_loss"] == pytest.approx(plain["metrics"]["val_loss"], **CLOSE)
    assert found["json"]["rates"][0] < found["json"]["rates"][-1] == pytest.approx(0.02)
    fabric, *stages = found["fabric"]
    for weights in stages:
        assert weights == pytest.approx(fabric, **CLOSE)
