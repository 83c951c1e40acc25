"""The Lightning example, run as its first lines say: two ranks, then resumed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import ROOT, run_python


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_the_example_trains_and_resumes_as_its_first_lines_say(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "train_lightning.py").read_text()
    commands = re.findall(r"^    python (examples/train_lightning.py .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    found = []
    for command in commands:
        done = run_python(*command.replace("examples/", f"{ROOT}/examples/").split(), folder=tmp_path, timeout=400)
        assert done.returncode == 0, done.stderr
        found += re.findall(r"validation loss ([\d.]+) after (\d+) steps at stage 3", done.stdout)
    (first, steps), (second, more) = found
    assert (int(steps), int(more)) == (100, 200)
    assert float(second) < float(first) < 5.0  # ln(256) = 5.5 for random weights
    assert (tmp_path / "runs" / "lightning" / "weights.ckpt").is_file()
