"""What a user sees of a plan: answers, nearest names, verdicts, files; and the estimators people know."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onecopy.cli.main import main
from onecopy.errors import PlanError
from onecopy.observe.ledger import Ledger
from onecopy.plan import Subject, estimate_zero3_model_states_mem_needs_all_live, plan, virtual_world
from onecopy.plan.estimate import Estimator, Setting, exact
from onecopy.plan.estimators import estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs
from onecopy.plan.hardware import Machine, machine
from onecopy.plan.impossible import at_least, states_floor
from onecopy.plan.models import subject_for
from onecopy.plan.report import page
from onecopy.plan.tape import Await, Compute, Tape, Transfer
from onecopy.plan.timing import Rates, play
from onecopy.plan.unseen import GIB, intervals, unseen
from onecopy.train.model import GPT, GPTConfig
from tests.plan.test_exact import LENGTH, gpt


def test_plan_answers_with_all_stages_and_verdicts() -> None:
    answer = plan(gpt(), "8xA100-80GB", sequence=LENGTH, micro_batch=2, checkpointing="full")
    assert answer.config()["onecopy"] == {"checkpoint_activations": "full"}
    answer = plan(gpt(), "8xA100-80GB", sequence=LENGTH, micro_batch=2, advise=True)
    assert [choice.setting.stage for choice in answer.stages] == [0, 1, 2, 3]
    assert answer.chosen.fits and answer.chosen.allocated <= answer.chosen.reserved <= answer.chosen.bound
    assert sum(answer.peak.values()) == answer.chosen.allocated
    assert answer.config()["train_batch_size"] % 8 == 0
    assert answer.settings[0].fits and answer.advice
    assert answer.chosen.host_bound and "the host takes to start" in answer.text()  # a toy model on such a GPU
    assert 0 < answer.chosen.mfu <= 1
    json.dumps(answer.as_dict())
    assert "GiB" in answer.text()


def test_the_page_needs_no_network() -> None:
    text = page(plan(gpt(), "4xH100", sequence=LENGTH))
    assert "__DATA__" not in text and not re.search(r"""(src|href)=["']?(https?:)?//|@import|fetch\(""", text)


def test_what_cannot_fit_says_the_smallest_change(tmp_path: Path) -> None:
    own = tmp_path / "gpus.toml"
    own.write_text("[toy]\nmemory = 2.3e9\nflops = 1e13\nbandwidth = 1e11\nlink = 1e10\n")
    answer = plan(gpt(), "2xtoy", sequence=LENGTH, hardware=own)
    assert not answer.chosen.fits
    assert any("Nothing fits" in sentence for sentence in answer.advice)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: subject_for("lama-13b"), "llama-13b"),
        (lambda: machine("8xA100-80G"), "a100-80gb"),
        (lambda: subject_for("onecopy.train.model:parameter_group"), "parameter_groups"),
        (lambda: machine("0xH100"), "at least 1"),
        (lambda: machine("H100x8"), "8xH100"),
        (lambda: plan(gpt(), "8xH100", sequence=0), "at least 1"),
        (lambda: plan(gpt(), "8xH100", global_batch=12), "16 can"),
        (lambda: plan(gpt(), "8xH100", config="no_such_file.json"), "cannot be read"),
    ],
)
def test_bad_names_get_the_nearest(call: Any, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        call()


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y if y.sum().item() > 0 else -y


def test_a_model_that_reads_values_is_told_where() -> None:
    subject = Subject("reads", Reads, lambda size, _: {"x": torch.randn(size, 8)}, lambda y: y.mean())
    with pytest.raises(PlanError, match=r"test_plan.py:\d+"):
        plan(subject, "2xH100")


def test_command_line_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny_model.py").write_text(
        "import torch\nfrom torch import nn\ndef make():\n    m = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])\n"
        "    return m, lambda batch, length: {'input': torch.randn(batch, 8)}\n"
    )
    code = main(
        [
            "plan",
            "tiny_model:make",
            "--gpus",
            "2xH100",
            "--json",
            "--compile",
            "--html",
            "r.html",
            "--write",
            "c.json",
            "--trace",
            "t.json",
        ]
    )
    printed = json.loads(capsys.readouterr().out)
    assert (
        code == 0
        and printed["chosen"]["fits"]
        and printed["chosen"]["compiled"]
        and printed["peak_bytes_by_category"]["masters"] > 0
    )
    assert Path("r.html").read_text().startswith("<!doctype html>")
    assert json.loads(Path("c.json").read_text())["zero_optimization"]["stage"] == printed["chosen"]["stage"]
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    assert main(["plan", "lama-13b"]) == 1
    assert "llama-13b" in capsys.readouterr().err


def test_lanes_overlap_and_waits_are_exposed() -> None:
    where = machine("8xA100-80GB")
    second = [(int(where.gpu.flops), 0, 10**9)]
    work = Compute("forward", "", second, operators=1)
    rates = Rates(matmul=1.0)
    transfer = where.transfer_seconds(10**9)
    hidden = play([Transfer("gather", 10**9, 1, "a"), work, Await(1)], where, rates)
    assert hidden.exposed == 0 and hidden.seconds == pytest.approx(1.0)
    bare = play([Transfer("gather", 10**9, 1, "a"), Await(1), work], where, rates)
    assert bare.exposed == pytest.approx(transfer) and bare.seconds == pytest.approx(1 + transfer)


def test_a_step_is_as_long_as_the_host_takes_to_start_its_operators() -> None:
    where = machine("8xA100-80GB")
    many = Compute("forward", "", [], traffic=1, operators=1000)
    assert play([many], where, Rates(launch=1e-6, host=5e-6)).seconds == pytest.approx(5e-3)
    assert play([many], where, Rates(launch=9e-6, host=5e-6)).seconds == pytest.approx(9e-3)


def test_compute_beside_a_slow_transfer_is_slowed_less() -> None:
    """In proportion to the transfer's rate: a slow network takes little of the memory's bandwidth and of the processors."""
    near, far = machine("8xA100-80GB"), machine("16xA100-80GB")
    rates = Rates(matmul=1.0, overlap=1.3)
    work = Compute("forward", "", [(int(near.gpu.flops), 0, 10**9)], operators=1)

    def beside(where: Machine) -> float:
        large = Transfer("gather", 10**13, 1, "a")
        return play([large, work], where, rates).compute

    assert beside(near) == pytest.approx(1.3)
    slow = replace(far, gpu=replace(far.gpu, node_network=far.gpu.node_network / 10))
    assert 1.0 < beside(slow) < 1.05 < beside(far)


def test_compiled_units_move_only_what_enters_and_leaves_a_kernel() -> None:
    tape = Tape()
    tape.recording, tape.where = True, SimpleNamespace(phase="forward", module="blocks.0")
    ledger = Ledger()
    ledger.operators = tape
    with FakeTensorMode(), ledger:
        x, weight = torch.empty(64, 64), torch.empty(64, 64)
        y = x.relu() * 2 + 1  # one kernel: reads x, writes y, which the product reads
        z = y @ weight
        (z + x).sigmoid_().sum()  # the next one: reads z and x, writes a number nobody reads
    (stretch,) = (event for event in tape.events if isinstance(event, Compute))
    nbytes = 64 * 64 * 4
    assert stretch.traffic > 8 * nbytes and nbytes < stretch.reduced < 2 * nbytes
    assert (stretch.fused, stretch.kernels, len(stretch.matmuls)) == (4 * nbytes, 3, 1)


def test_compiled_units_are_planned_faster_and_take_the_same_memory() -> None:
    estimator, where, plain = Estimator(gpt(), 8, LENGTH), machine("8xH100"), Setting(2, 8)
    compiled = replace(plain, compiled=True)
    faster, slower = (estimator.played(setting, where, Rates()).seconds for setting in (compiled, plain))
    assert faster < slower and estimator.peak(compiled) == estimator.peak(plain)


def test_blocks_larger_than_the_prefetch_bucket_are_gathered_ahead() -> None:
    """One unit always is, or nothing would overlap; 0 turns it off."""
    where = machine("8xA100-80GB")
    exposed = {}
    for bucket in (0, 1, 10**9):
        tape = Tape()
        exact(gpt(6), Setting(3), 8, LENGTH, {"zero_optimization": {"stage3_prefetch_bucket_size": bucket}}, tape=tape)
        exposed[bucket] = play(tape.events, where, Rates()).exposed
    assert exposed[0] > exposed[1] == exposed[10**9]


def test_blocks_of_billions_have_two_slots() -> None:
    """The default of `stage3_max_live_parameters` is no bound, a written one is."""
    width, tokens = (
        10_240,
        {"tokens": torch.zeros(1, 4, dtype=torch.long), "targets": torch.zeros(1, 4, dtype=torch.long)},
    )
    wide = Subject("wide", lambda: GPT(GPTConfig(64, 8, 2, 8, width)), lambda *_: tokens, lambda loss: loss)
    block = 2 * 12 * width**2  # bytes of bf16, and biases beside
    for zero, slots in (({}, 2), ({"stage3_max_live_parameters": 10**9}, 1)):
        held = exact(wide, Setting(3), 8, 4, {"zero_optimization": zero}).resting["slots"]
        assert held == pytest.approx(slots * block, rel=0.01)


def test_estimators_of_deepspeeds_signatures(capsys: pytest.CaptureFixture[str]) -> None:
    """16 bytes a parameter are shared by the ranks; offload counts the ranks of all nodes, as DeepSpeed's formula does."""
    _, two = estimate_zero2_model_states_mem_needs(10**9, num_gpus_per_node=8, cpu_offload=False)
    assert two == 4 * 10**9
    host, _ = estimate_zero2_model_states_mem_needs(10**9, num_gpus_per_node=8, num_nodes=2)
    assert host == 96 * 10**9
    _, three, largest = estimate_zero3_model_states_mem_needs(10**9, 10**7, num_gpus_per_node=8, cpu_offload=False)
    assert three == 2 * 10**9 + largest
    estimate_zero3_model_states_mem_needs_all_live(nn.Linear(100, 100), 8, 1)
    assert "GiB" in capsys.readouterr().out


def test_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "gpus.toml"
    own.write_text(
        "[toy]\nmemory = 8e10\nflops = 1e13\nbandwidth = 1e15\nlink = 1e15\n"
        "[toy.rates]\nmatmul = 9.0\nattention = 9.0\nlaunch = 0.0\nhost = 0.0\n"
    )
    with pytest.raises(PlanError, match="cannot be"):
        plan(gpt(), "1xtoy", sequence=LENGTH, hardware=own)
    with pytest.raises(PlanError, match="cannot be"):
        at_least(104 * GIB, states_floor(70e9, 3, 8), "a run")  # 16 bytes a parameter over 8 ranks are 130 GiB
    at_least(104 * GIB, states_floor(13e9, 2, 8), "a run")


def test_memory_has_a_guess_and_a_bound_at_every_level() -> None:
    found = intervals(10 * GIB, unseen(10 * GIB, 8))
    guesses = [found[level].guess for level in ("allocated", "reserved", "device")]
    bounds = [found[level].bound for level in ("allocated", "reserved", "device")]
    assert (
        guesses == sorted(guesses)
        and bounds == sorted(bounds)
        and all(a < b for a, b in zip(guesses, bounds, strict=True))
    )


@pytest.mark.parametrize(
    ("gpus", "nbytes", "least", "most"),
    [
        ("8xA100-80GB", 2**30, 3.9e-3, 4.3e-3),
        ("2xA100-80GB", 2**20, 20e-6, 24e-6),
        ("8xH200", 2**34, 0.040, 0.043),
        ("32xB200", 2**30, 2.5e-3, 3.2e-3),
    ],
)
def test_transfers_take_what_was_measured(gpus: str, nbytes: int, least: float, most: float) -> None:
    """Half of the table's all-reduce; gathers on switches that add (NVLS) stay at the ring's rate."""
    assert least < machine(gpus).transfer_seconds(nbytes) < most


@pytest.mark.parametrize("size", [0, 20_000])
def test_worlds_out_of_range(size: int) -> None:
    with pytest.raises(PlanError, match="16384"), virtual_world(size):
        pass
