"""Hugging Face's Trainer with `deepspeed=`: the losses of the plain Trainer, on two ranks, resumed, with weights that load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, run_python

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RUNS = str(Path(__file__).with_name("hf_runs.py"))
PRECISIONS = str(Path(__file__).with_name("hf_precisions.py"))


def results(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What each run of `hf_runs.py` printed."""
    done = run_python(*words, folder=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The Trainer alone, with the batch of two ranks and two micro-batches."""
    first, _ = results(tmp_path_factory.mktemp("plain"), RUNS, "plain")
    return first


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_trainer_trains_as_without_deepspeed_and_resumes(stage: int, plain: dict[str, Any], tmp_path: Path) -> None:
    command = ("-m", "onecopy", "run", "--nproc", "2", "--force", RUNS, str(stage))
    whole, resumed = results(tmp_path, *command)
    assert (whole["ranks"], plain["ranks"]) == (2, 1)
    assert whole["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert whole["norm"] == pytest.approx(plain["norm"], rel=1e-5)
    assert whole["evaluation"] == pytest.approx(plain["evaluation"], rel=1e-5)
    assert whole["saved"] == pytest.approx(plain["saved"], rel=1e-6)  # tied weights once, too
    assert {**resumed} == {**whole}
    assert (tmp_path / f"stage_{stage}" / "checkpoint-3" / "global_step3").is_dir()


PRETRAINED = """
import torch
from transformers import HfArgumentParser, LlamaForCausalLM, Trainer, TrainingArguments
from tests.integrations.hf_runs import small_model, zero

arguments = TrainingArguments(
    output_dir="out", deepspeed=zero(3), max_steps=2, per_device_train_batch_size=2, save_steps=1, eval_strategy="steps",
    eval_steps=1, load_best_model_at_end=True, learning_rate=1e-2, report_to="none", disable_tqdm=True,
)
rank = arguments.process_index
if rank == 0:
    small_model().save_pretrained("start")
torch.distributed.barrier()
model = LlamaForCausalLM.from_pretrained("start")  # Trainer's stage 3: under zero.Init
model.resize_token_embeddings(40)
rows = [torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(n)) for n in range(8)]
data = [{"input_ids": row, "labels": row} for row in rows]

class Writes(Trainer):
    lengths = []

    def evaluation_loop(self, *arguments, **options):
        # One rank stops long before the other, which needs its shards.
        prompt = torch.zeros(1, 2, dtype=torch.long)
        written = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2 + 3 * rank,
                                      do_sample=False, pad_token_id=0, eos_token_id=None, synced_gpus=True)
        self.lengths.append(written.shape[1])
        return super().evaluation_loop(*arguments, **options)

trainer = Writes(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
assert trainer.state.best_model_checkpoint in ("out/checkpoint-1", "out/checkpoint-2")
best = trainer.evaluate()["eval_loss"]
assert abs(best - trainer.state.best_metric) < 1e-6, (best, trainer.state.best_metric)
assert trainer.lengths == [4 + 3 * rank] * 3, trainer.lengths
trainer.save_model("out/final")
trainer.accelerator.wait_for_everyone()
again = LlamaForCausalLM.from_pretrained("out/final")  # under zero.Init, so on every rank
assert again.get_input_embeddings().weight.ds_shape == (40, 32)
if rank == 0:
    print("DONE", flush=True)
torch.distributed.barrier()
"""


@pytest.mark.slow
def test_pretrained_resized_generating_with_the_best_model_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import sys; sys.path.insert(1, {str(ROOT)!r})\n" + PRETRAINED)
    done = run_python(
        "-m", "onecopy", "run", "--nproc", "2", "--force", "script.py", folder=tmp_path, timeout=400
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "DONE" in done.stdout


@pytest.mark.slow
def test_bf16_and_fp16_on_cpu_ranks_train_near_fp32_and_load_the_best_model(tmp_path: Path) -> None:
    script = (
        f"import runpy, sys; sys.path.insert(1, {str(ROOT)!r}); runpy.run_path({PRECISIONS!r}, run_name='__main__')"
    )
    (tmp_path / "script.py").write_text(script)
    found = results(tmp_path, "-m", "onecopy", "run", "--nproc", "2", "--force", "script.py")
    full, bf16, fp16 = found[:3]
    assert [run["computed in"] for run in found[:3]] == ["torch.float32", "torch.bfloat16", "torch.float16"]
    for run in found:
        assert run["saved in"] == run["computed in"]
        assert run["losses"] == pytest.approx(full["losses"], rel=0.01)
        assert run["evaluation"] == pytest.approx(run["best"], rel=1e-6)
    for low, high in zip((full, bf16, fp16), found[3:], strict=True):
        assert high["losses"] == pytest.approx(low["losses"], rel=1e-5)  # stage 3 as stage 2


@pytest.mark.slow
def test_the_example_runs_as_its_first_lines_say(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = (ROOT / "examples" / "finetune_hf_trainer.py").read_text()
    (command,) = re.findall(r"^    onecopy (run .*?)\n\n", text, re.DOTALL | re.MULTILINE)
    words = command.replace("\\\\\n", " ").replace("examples/", f"{ROOT}/examples/").split()
    done = run_python("-m", "onecopy", words[0], "--force", *words[1:], folder=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"evaluation loss ([\d.]+) after 60 steps; saved in runs/hf", done.stdout)
    assert float(loss) < 4.5  # ln(256) = 5.5 for random weights
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "hf").config.vocab_size == 256
