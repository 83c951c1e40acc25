"""A plan for the user's own document: what is written there is planned, and what is written back is what runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onecopy.cli.main import main
from onecopy.errors import OneCopyError
from onecopy.observe.log import forget_said
from onecopy.plan import Subject, plan, rehearse, virtual_world
from onecopy.plan.advisor import search
from onecopy.plan.estimate import Estimator, Setting, exact
from onecopy.plan.hardware import machine
from onecopy.plan.timing import Rates
from onecopy.plan.wanted import setting_of
from tests.plan.test_exact import LENGTH, gpt
from tests.worlds import world

DOCUMENT: dict[str, Any] = {
    "train_batch_size": 6, "zero_optimization": {"stage": 3},
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},  # what a trainer's arguments fill
    "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2},
    "onecopy": {"checkpoint_activations": 2, "slots": 3},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
}  # fmt: skip


def run_of(document: dict[str, Any]) -> tuple[int, dict[str, int], dict[str, int]]:
    """Peak, categories at the peak and the engine's own account, of training by a written configuration."""
    run = rehearse(gpt(4), document, document["train_micro_batch_size_per_gpu"], LENGTH)
    state = {name: size for name, size in run.memory.items() if name != "activations_peak"}
    return run.peak, run.at_peak(), state


def test_what_is_written_back_is_what_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_said()
    given, written = tmp_path / "ds.json", tmp_path / "planned.json"
    given.write_text(json.dumps(DOCUMENT))
    answer = plan(gpt(4), "2xA100-80GB", sequence=LENGTH, config=given)
    assert len(caplog.messages) == len(set(caplog.messages))  # the engine of dozens of rehearsals says a thing once
    assert answer.chosen.setting == Setting(3, 3, 1, 2, "bf16", 3)
    answer.write(written)
    document = json.loads(written.read_text())
    assert document["onecopy"] == DOCUMENT["onecopy"] and document["train_batch_size"] == 6
    assert document["scheduler"] == DOCUMENT["scheduler"]
    del document["scheduler"]  # its "auto" is a trainer's to fill
    written.write_text(json.dumps(document))
    assert main(["check", str(written), "--world-size", "2"]) == 0
    with virtual_world(2, accelerator=False):
        planned = run_of(document)
        document["onecopy"]["checkpoint_activations"] = "none"
        assert run_of(document)[0] > planned[0]
    assert planned == world(2).run(run_of, json.loads(written.read_text()))[0]
    for category in ("parameters", "masters", "moments"):
        assert answer.rehearsal.resting[category] == planned[2][category], category


def test_inputs_that_wait_on_the_host_are_not_on_the_accelerator() -> None:
    setting = Setting(3, 64, 1, "full")
    here = exact(gpt(12), setting, 4, LENGTH).peak
    there = exact(gpt(12), setting, 4, LENGTH, {"activation_checkpointing": {"cpu_checkpointing": True}}).peak
    inputs = 12 * 64 * LENGTH * 64 * 2  # bytes
    assert 0.7 * inputs < here - there <= inputs


def test_shallow_rehearsals_know_every_nth_block() -> None:
    setting = Setting(2, 3, 1, 5)
    whole = exact(gpt(13), setting, 4, LENGTH).peak
    assert Estimator(gpt(13), 4, LENGTH).peak(setting) == pytest.approx(whole, rel=0.02)


def test_options_count_before_the_document() -> None:
    document = {
        "train_batch_size": 64, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 0}, "fp16": {"enabled": True},
    }  # fmt: skip
    assert setting_of(document, 8) == Setting(0, 4, 2, "none", "fp16")
    changed = setting_of(document, 8, micro_batch=2, precision="bf16", checkpointing="selective")
    assert changed == Setting(0, 2, 4, "selective", "bf16")  # the global batch stays
    written = changed.config(document)
    assert written["fp16"]["enabled"] is False and written["bf16"]["enabled"] is True
    assert setting_of(document, 8, micro_batch=2, accumulation=1, stage=3) == Setting(3, 2, 1, "none", "fp16")
    assert setting_of(None, 8) == Setting(3, 1, 1, "none", "bf16") and setting_of({}, 8).precision == "fp32"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"micro_batch": 3}, "48 or 72"),
        ({"checkpointing": 0}, "every n-th"),
        ({"micro_batch": 0}, "at least 1"),
        ({"stage": 5}, "choose 0"),
    ]
    for options, said in wrong:
        with pytest.raises(OneCopyError, match=said):
            setting_of(document, 8, **options)
    with pytest.raises(OneCopyError, match="as a block"):
        plan(gpt(), "8xH100", config={"zero_optimization": True})


def test_advice_for_a_model_without_blocks() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    flat = Subject("flat", build, lambda size, _: {"input": torch.randn(size, 8)}, lambda y: y.mean())
    found = search(Estimator(flat, 2, 1), machine("2xH100"), Rates(), Setting())
    assert {choice.setting.checkpointing for choice in found} == {"none"}
