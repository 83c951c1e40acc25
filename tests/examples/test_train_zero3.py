"""The shipped example, run as its first lines say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands import ROOT, run_python


def test_the_tutorial_loop_runs_with_only_the_import_changed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "import onecopy as deepspeed" in (ROOT / "examples" / "train_zero3.py").read_text()
    document = json.loads((ROOT / "examples" / "ds_config_zero3.json").read_text())
    document["optimizer"]["params"]["lr"] = 2e-3  # ten steps at a rate for fine-tuning would show nothing
    config = tmp_path / "config.json"
    config.write_text(json.dumps(document))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run_python(*launcher, "examples/train_zero3.py", "--steps", "81", "--config", str(config))
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"micro-batch +(\d+)  loss ([\d.]+)  learning rate ([\d.e+-]+)", done.stdout)
    assert [int(step) for step, _, _ in lines] == [0, 40, 80]
    losses = [float(loss) for _, loss, _ in lines]
    assert losses[2] < losses[0] - 0.3 and losses[0] < 5.7  # ln(256) = 5.55 for random weights
    assert float(lines[1][2]) > 0  # the schedule moves the optimizer's learning rate
    # The loop steps after 1, 9, 17, ... micro-batches; the first of these windows had just begun.
    assert "10 optimizer steps" in done.stdout
