"""A plan is the engine without memory: its peak equals a real CPU run's, by the same ledger, to the byte."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from datetime import date
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from onecopy.activations.settings import is_configured
from onecopy.engine.engine import Engine
from onecopy.errors import PlanError
from onecopy.plan import Subject, rehearse, virtual_world
from onecopy.plan.estimate import Estimator, Setting, exact
from onecopy.plan.extended import Extended
from onecopy.plan.models import from_config_dict
from onecopy.plan.tape import Tape
from onecopy.train.model import GPT, GPTConfig
from tests.worlds import world

VOCABULARY, LENGTH = 203, 24
HIDDEN = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**HIDDEN, "num_key_value_heads": 2}
TINY = {
    "bert": {"model_type": "bert", **HIDDEN},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "llama": {"model_type": "llama", **GROUPED},
    "mixtral": {"model_type": "mixtral", **GROUPED, "num_local_experts": 4},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 16},
    "t5": {"model_type": "t5", "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16},
    "vit": {"model_type": "vit", **HIDDEN, "image_size": 32, "patch_size": 8},
}


def gpt(layers: int = 3, dropout: float = 0.0) -> Subject:
    shape = GPTConfig(VOCABULARY, LENGTH, layers, 4, 64, dropout)

    def batch(size: int, length: int) -> dict[str, torch.Tensor]:
        return {
            "tokens": torch.randint(0, VOCABULARY, (size, length)),
            "targets": torch.randint(0, VOCABULARY, (size, length)),
        }

    return Subject("gpt", lambda: GPT(shape), batch, lambda loss: loss, LENGTH, layers=layers, shrink=gpt)


def subject(name: str) -> Subject:
    if name == "gpt":
        return gpt()
    shape = {"vocab_size": VOCABULARY, **TINY[name]} if name != "vit" else TINY[name]
    return from_config_dict(shape, name)


def document(stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }  # fmt: skip


def measure(
    name: str, stage: int, precision: str, accumulation: int, checkpointing: str | int
) -> tuple[int, dict[str, int], dict[str, int], dict[str, Any]]:
    """Peak, what it was made of, what rests after the step, and what was sent; the second of two steps."""
    config = {**document(stage, precision, accumulation), "onecopy": {"checkpoint_activations": checkpointing}}
    run = rehearse(subject(name), config, 2, LENGTH)
    return run.peak, run.at_peak(), run.resting, run.windows[-1].sent


def plan_and_run(size: int, name: str, *setting: Any) -> tuple[int, int]:
    """Peaks of a rehearsal and of a real run."""
    subject(name)  # imports the model's code, which a virtual world must find when it begins
    with virtual_world(size, accelerator=False):
        planned = measure(name, *setting)
    return planned[0], world(size).run(measure, name, *setting)[0][0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "accumulation", "checkpointing"), [("fp32", 1, "none"), ("bf16", 4, "full")])
def test_plan_equals_a_real_run_to_the_byte(
    size: int, stage: int, precision: str, accumulation: int, checkpointing: str | int
) -> None:
    with virtual_world(size, accelerator=False):
        planned = measure("gpt", stage, precision, accumulation, checkpointing)
    assert planned == world(size).run(measure, "gpt", stage, precision, accumulation, checkpointing)[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "accumulation", "checkpointing"), [("fp16", 1, "none"), ("fp16", 4, "full"), ("bf16", 1, "full")]
)
def test_plan_equals_a_run_of_four_ranks_to_the_byte(
    stage: int, precision: str, accumulation: int, checkpointing: str | int
) -> None:
    with virtual_world(4, accelerator=False):
        planned = measure("gpt", stage, precision, accumulation, checkpointing)
    assert planned == world(4).run(measure, "gpt", stage, precision, accumulation, checkpointing)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("stage", [0, 2])
def test_transformers_models_with_accumulation_are_within_a_percent(name: str, stage: int) -> None:
    pytest.importorskip("transformers")
    planned, real = plan_and_run(2, name, stage, "bf16", 4, "none")
    assert planned == pytest.approx(real, rel=0.01)


GRID = list(
    product(
        sorted(TINY), (0, 1, 2, 3), (1, 2, 3, 4), ("fp32", "bf16", "fp16"), (1, 4), ("none", "full", "selective", 2)
    )
)  # of which another part is measured on another day


@pytest.mark.slow
@pytest.mark.parametrize("case", random.Random(date.today().toordinal()).sample(GRID, 24), ids=str)
def test_any_model_and_setting_is_within_a_percent(case: tuple[str, int, int, str, int, str | int]) -> None:
    pytest.importorskip("transformers")
    name, stage, size, precision, accumulation, checkpointing = case
    planned, real = plan_and_run(size, name, stage, precision, accumulation, checkpointing)
    assert planned == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(("stage", "precision", "checkpointing"), [(1, "fp32", "none"), (3, "bf16", "full")])
def test_transformers_models_are_within_a_percent(name: str, stage: int, precision: str, checkpointing: str) -> None:
    pytest.importorskip("transformers")
    planned, real = plan_and_run(2, name, stage, precision, 1, checkpointing)
    assert planned == pytest.approx(real, rel=0.01)


def test_the_ledgers_state_is_the_engines_own_account() -> None:
    """Field report MEM-02: states by stage, padding, slots and buckets included, and fewer bytes a rank with more ranks."""
    before = None
    for size in (2, 8, 64):
        with virtual_world(size):
            run = rehearse(gpt(), document(3, "bf16", 1), 2, LENGTH)
        for category in ("masters", "moments", "slots"):
            assert run.resting[category] == run.memory[category], category
        states = run.resting["masters"] + run.resting["moments"]
        assert before is None or states < before
        before = states


def test_a_rehearsal_that_fails_leaves_nothing_behind() -> None:
    """No engine, hook, setting or fake tensor; the next rehearsal is as the first."""

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    def fails_in_backward(loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(fails)
        return loss

    def alive() -> int:
        gc.collect()
        return sum(type(thing) in (FakeTensor, Engine) for thing in gc.get_objects())

    others = alive()
    setting, base = Setting(3, 2, 1, "full"), {"activation_checkpointing": {"cpu_checkpointing": True}}
    peak = exact(gpt(), setting, 2, LENGTH, base).peak
    before = dict(_global_optimizer_pre_hooks)
    for change in ({"loss": fails}, {"loss": fails_in_backward}, {"batch": fails}, {"build": fails}):
        with pytest.raises(PlanError, match="ZeroDivisionError"):
            exact(replace(gpt(), **change), setting, 2, LENGTH, base)
        assert before == _global_optimizer_pre_hooks and not is_configured() and not torch.distributed.is_initialized()
        assert exact(gpt(), setting, 2, LENGTH, base).peak == peak
    assert alive() <= others


@pytest.mark.parametrize(
    "setting",
    [Setting(1, 8, 1, "full"), Setting(3, 5, 1, "none"), Setting(2, 3, 4, "full"), Setting(0, 2, 1, "selective")],
)
def test_shallow_rehearsals_stand_for_deep_ones(setting: Setting) -> None:
    subject = gpt(12)
    estimated = Estimator(subject, 4, LENGTH).peak(setting)
    assert estimated == pytest.approx(exact(subject, setting, 4, LENGTH).peak, rel=0.002)


def test_one_warm_window_stands_for_later_ones() -> None:
    setting = Setting(3, 2, 1, "none")
    config = setting.config()
    with virtual_world(4):
        later = rehearse(gpt(), config, 2, LENGTH, windows=3).peak
    assert exact(gpt(), setting, 4, LENGTH).peak == later


def test_dropout_keeps_what_it_keeps_on_an_accelerator() -> None:
    """One byte an element of each dropout, and no attention scores: not the CPU's noise as wide as the input."""
    kept = [exact(gpt(dropout=share), Setting(3, 2), 4, LENGTH).peak for share in (0.0, 0.1)]
    assert kept[1] - kept[0] == (2 * 3 + 1) * 2 * LENGTH * 64
    again = exact(gpt(dropout=0.1), Setting(3, 2, 1, "full"), 4, LENGTH)  # blocks compute again what they computed
    assert again.peak < kept[1]


def test_a_deep_model_is_extended_from_two_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal blocks are traced once: peak, categories, modules and bytes sent equal those of the whole rehearsal."""
    monkeypatch.setattr("onecopy.plan.estimate.DEEP", 8)
    setting = Setting(3, 1, 1, "none")
    whole = exact(gpt(12), setting, 4, LENGTH)
    extended = Estimator(gpt(12), 4, LENGTH).whole(setting, Tape())
    assert isinstance(extended, Extended) and (extended.numel, extended.model_bytes) == (whole.numel, whole.model_bytes)
    assert extended.peak == pytest.approx(whole.peak, rel=0.002)
    held, expected = extended.at_peak(), whole.at_peak()
    assert sum(held.values()) == extended.peak
    for name in held:
        assert held[name] == pytest.approx(expected[name], abs=0.01 * whole.peak), name
    assert extended.windows[-1].sent["bytes_sent"] == pytest.approx(whole.windows[-1].sent["bytes_sent"], rel=0.001)
    assert extended.holders(3) and len(extended.timeline()) > 50
    assert max(sum(values.values()) for _, values in extended.timeline()) == extended.peak
