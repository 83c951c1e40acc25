"""`onecopy exec`: any command's Python processes find the module, and `accelerate launch --use_deepspeed` trains with it."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT, run_python

ASK = """
import importlib.metadata, importlib.util, subprocess, sys
print(importlib.metadata.version("deepspeed"), importlib.util.find_spec("deepspeed").origin, "torch" in sys.modules, MARK)
if sys.argv[-1] != "child":
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""

TRAIN = """
import json, sys
sys.path.insert(1, ROOT)
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tests.integrations.accelerate_loop import examples, small_model

accelerator = Accelerator()
model = small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(examples(), batch_size=4))
for inputs, targets in loader:
    accelerator.backward((model(inputs) - targets).square().mean())
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    found = {name: weight.flatten().tolist() for name, weight in weights.items()}
    print("RESULT", json.dumps([accelerator.num_processes, model.zero_optimization_stage(), found]), flush=True)
torch.distributed.barrier()
"""


def test_processes_find_the_module_and_their_own_sitecustomize(tmp_path: Path) -> None:
    """Nothing heavy is imported for it, and children of the command find it too."""
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.MARK = 'theirs'")
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    program = f"import os; os.environ['PYTHONPATH'] += ':{tmp_path}'; from onecopy.cli.main import main; main()"
    done = run_python("-c", program, "exec", "--force", sys.executable, str(script), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("0.19.8+onecopy ") and "/onecopy/integrations/deepspeed/tree/" in line
        assert line.endswith("False theirs")


def test_a_command_that_is_not_there_is_named() -> None:
    done = run_python("-m", "onecopy", "exec", "no-such-command", "--option")
    assert done.returncode == 1 and "no-such-command" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch_trains_as_torch(tmp_path: Path) -> None:
    from tests.integrations.accelerate_loop import examples, small_model

    (tmp_path / "train.py").write_text(TRAIN.replace("ROOT", repr(str(ROOT))))
    launch = "accelerate.commands.launch --use_deepspeed --zero_stage 3 --zero3_save_16bit_model true --gradient_clipping 1.0"
    command = [sys.executable, "-m", *launch.split(), "--num_processes", "2", "train.py"]
    done = run_python("-m", "onecopy", "exec", "--force", *command, folder=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    ranks, stage, weights = json.loads(line)
    assert (ranks, stage) == (2, 3)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows, targets in zip(*(tensor.split(8) for tensor in examples().tensors), strict=True):
        optimizer.zero_grad()
        (model(rows) - targets).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, weight in model.named_parameters():
        assert weights[name] == pytest.approx(weight.flatten().tolist(), rel=1e-4, abs=1e-6), name
