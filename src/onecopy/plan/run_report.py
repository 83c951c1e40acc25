"""A real run on the page of a plan: what its record says, beside a rehearsal of the same engine on the same model."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onecopy.engine.recording import FILE
from onecopy.errors import PlanError
from onecopy.observe.ledger import CATEGORIES
from onecopy.plan.estimate import Setting, exact
from onecopy.plan.hardware import Machine, known_like
from onecopy.plan.models import subject_for
from onecopy.plan.rehearsal import Rehearsal, Subject
from onecopy.plan.report import filled, merged
from onecopy.plan.tape import Tape
from onecopy.plan.timing import play, rates_for

LANES = (
    "What the host saw in the recorded step: operators by block, each transfer from its start to the end of its wait. "
    "On an accelerator that is when work was queued, not when it ran."
)
WARM_UP = 2  # steps: the first makes optimizer state


@dataclass
class Run:
    """A run's record: what ran, its steps, and one of them storage by storage ({} where none was)."""

    folder: Path
    what: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read `folder/run_record.jsonl`. Raises PlanError where there is none, or no step in it."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise PlanError(
                f"{folder} has no {FILE}; `onecopy train` writes one, and so does a run whose configuration has "
                f'"onecopy": {{"record": "{folder}"}}'
            )
        run = cls(Path(folder), {})
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
            if not text.endswith("\n"):
                break  # the run is still writing it, or was ended meanwhile
            try:
                line = json.loads(text)
                {"run": run.what.update, "step": run.steps.append, "detail": run.detail.update}[line["kind"]](line)
            except (ValueError, KeyError, TypeError):
                raise PlanError(
                    f"line {number} of {path} is not one that onecopy writes; is it another file?"
                ) from None
        if not run.what or not run.steps:
            raise PlanError(f"{path} has no step yet; wait for the run's first one")
        return run

    @property
    def step_seconds(self) -> float:
        """The median of the steps after the warm-up, the recorded one left out; of all where there are no others."""
        usual = [step["seconds"] for step in self.steps if step["step"] > WARM_UP and not step["detailed"]]
        return float(statistics.median(usual or [step["seconds"] for step in self.steps]))

    @property
    def samples_per_second(self) -> float:
        return float(self.steps[-1]["samples"] / self.step_seconds)

    @property
    def sequence(self) -> int:
        """Tokens a sample, as the first forward's first tensor has them; 1 where it has one dimension."""
        shape = next((shape for shape in self.what["inputs"] if len(shape) >= 2), [1, 1])
        return int(shape[1])


@dataclass
class Beside:
    """The plan of what ran: a rehearsal, and the seconds of a step where the machine's rates are known."""

    rehearsal: Rehearsal
    seconds: float | None


def subject_of(run: Run, model: str | None) -> Subject | None:
    """What ran, as something to rehearse: what the user names it, or the small GPT of `onecopy train`."""
    if model is not None:
        return subject_for(model)
    if not (run.folder / "settings.json").is_file():
        return None
    from onecopy.train.data import Corpus
    from onecopy.train.model import GPT, GPTConfig
    from onecopy.train.settings import Settings

    settings = Settings.load(str(run.folder))
    vocabulary = Corpus.open(run.folder / "text", settings.context).vocabulary.size
    names = ("context", "layers", "heads", "width", "dropout", "bias", "tied")
    shape = GPTConfig(vocabulary_size=vocabulary, **{name: getattr(settings, name) for name in names})

    def batch(size: int, length: int) -> dict[str, Any]:
        return {name: torch.zeros(size, length, dtype=torch.long) for name in ("tokens", "targets")}

    return Subject("GPT", lambda: GPT(shape), batch, lambda loss: loss, settings.context, layers=shape.layers)


def plan_of(run: Run, subject: Subject, machine: Machine | None = None) -> Beside:
    """Rehearse what ran, on the back end it ran on; `machine` for its time (default: the run's own device, where known)."""
    what, document = run.what, run.what["config"]
    precision = next((kind for kind in ("bf16", "fp16") if document.get(kind, {}).get("enabled") is True), "fp32")
    setting = Setting(what["stage"], what["micro_batch"], what["accumulation"], "none", precision)
    on_gpu = what["device"] != "CPU"
    rehearsal = exact(subject, setting, what["ranks"], run.sequence, document, accelerator=on_gpu)
    known = known_like(what["device"])
    where = machine or (Machine(known, what["ranks"]) if known else None)
    if where is None:
        return Beside(rehearsal, None)
    tape = Tape()
    exact(subject, setting, what["ranks"], run.sequence, document, tape=tape)
    return Beside(rehearsal, play(tape.events, where, rates_for(where.gpu)).seconds)


def comparison(run: Run, beside: Beside | None) -> list[list[str]]:
    """Rows of (what, measured, planned, ratio); the last two only with a plan."""
    rows: list[list[str]] = []
    planned = beside.rehearsal.at_peak() if beside else {}

    def row(name: str, measured: float, expected: float | None, show: Any) -> None:
        ratio = "" if not expected else f"{measured / expected - 1:+.2%}"
        rows.append([name, show(measured), *(["" if expected is None else show(expected), ratio] if beside else [])])

    held = run.detail.get("peak_bytes_by_category", {})
    for name in CATEGORIES:
        if held.get(name) or planned.get(name):
            row(f"{name} at the peak", held.get(name, 0), planned.get(name), _bytes)
    if held:
        row("all storages at the peak", sum(held.values()), sum(planned.values()) if beside else None, _bytes)
    last = run.steps[-1]
    if "allocated_peak_bytes" in last:
        row(
            "allocator, most allocated", last["allocated_peak_bytes"], sum(planned.values()) if beside else None, _bytes
        )
        row("allocator, most reserved", last["reserved_peak_bytes"], None, _bytes)
    sent = beside.rehearsal.windows[-1].sent["bytes_sent"] if beside else None
    row("sent a rank and step", last["sent"]["bytes_sent"], sent, _bytes)
    row("step, median", run.step_seconds, beside.seconds if beside else None, lambda s: f"{s:.4f} s")
    return rows


def text(run: Run, beside: Beside | None) -> str:
    """The answer for people."""
    lines = [
        f"{_title(run)}: stage {run.what['stage']}, micro-batch {run.what['micro_batch']}, accumulation {run.what['accumulation']}",
        f"{len(run.steps)} steps, median {run.step_seconds:.4f} s, {run.samples_per_second:,.2f} samples/s",
        "",
        f"{'':<28}{'measured':>14}" + (f"{'planned':>14}{'measured beside planned':>26}" if beside else ""),
    ]
    for name, *values in comparison(run, beside):
        lines.append(f"{name:<28}" + "".join(f"{value:>{width}}" for value, width in zip(values, (14, 14, 26))))
    if beside is None:
        lines += ["", "no plan beside it: name the model with --model, as `onecopy plan` would be told"]
    elif beside.seconds is None:
        lines += ["", "no planned time: give --hardware, written by `onecopy measure-hardware`, and --gpus"]
    return "\n".join(lines)


def run_page(run: Run, beside: Beside | None) -> str:
    """The page's HTML."""
    what, detail = run.what, run.detail
    window = beside.rehearsal.windows[-1] if beside else None
    peak = sum(detail.get("peak_bytes_by_category", {}).values())
    figures = [
        ["Step, median", f"{run.step_seconds:.4f} s"], ["Samples/s", f"{run.samples_per_second:,.2f}"], ["Steps", str(len(run.steps))],
        ["All storages at the peak", _bytes(peak)],
    ]  # fmt: skip
    data = {
        "plan": {
            "model": what["model"], "gpus": f"{what['ranks']} x {what['device']}", "parameters": what["parameters"],
            "sequence_tokens": run.sequence, "gpu_memory_bytes": 0, "stages": [], "settings": [], "advice": [], "unseen": [],
            "holders": detail.get("holders", []), "config": what["config"],
            "chosen": {
                "stage": what["stage"], "micro_batch": what["micro_batch"], "accumulation": what["accumulation"],
            },
        },
        "categories": list(CATEGORIES),
        "timeline": detail.get("timeline") or [[0, dict.fromkeys(CATEGORIES, 0)]],
        "marks": detail.get("marks", []),
        "bars": merged([tuple(bar) for bar in detail.get("bars", [])]),
        "notes": [f"torch {what['torch']}, onecopy {what['onecopy']}. The record is of rank 0."],
        "run": {
            "figures": figures, "steps": run.steps, "step": detail.get("step", 0), "comparison": comparison(run, beside),
            "has_plan": beside is not None, "lanes_text": LANES,
            "planned": None if beside is None or window is None else {
                "timeline": beside.rehearsal.timeline(),
                "marks": [(at, said) for at, said in beside.rehearsal.ledger.marks if window.start <= at <= window.stop],
            },
        },
    }  # fmt: skip
    return filled(_title(run), data)


def _title(run: Run) -> str:
    return f"{run.what['model']} on {run.what['ranks']} x {run.what['device']}"


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
