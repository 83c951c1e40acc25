"""The search: the user's own configuration first, then what Optuna asks for, losers ended early, failures survived."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onecopy.errors import OneCopyError
from onecopy.tune.space import MICRO, SHORT, Space, applied, batch_of, space_of
from onecopy.tune.target import Target
from onecopy.tune.trial import Trial, run_trial

HOPELESS = 0.8  # of the best rate so far: a trial below it after two steps is ended


@dataclass
class Limits:
    """How much is measured: `trials` runs, `steps` each after the warm-up, `timeout` seconds a run; `memory` bytes a rank."""

    trials: int = 12
    steps: int = 5
    timeout: float = 300.0
    free_batch: bool = False
    memory: float | None = None


@dataclass
class Study:
    """A finished search."""

    target: Target
    ranks: int
    trials: list[Trial]
    limits: Limits
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """The fastest trial that was measured to its end. Raises OneCopyError when there is none."""
        measured = [trial for trial in self.trials if trial.status == "measured"]
        if not measured:
            first = self.trials[0]
            raise OneCopyError(
                f"no trial could be measured; the first {first.status}: {first.detail or 'no reason found'}"
            )
        return max(measured, key=lambda trial: trial.samples_per_second or 0.0)

    def config(self) -> dict[str, Any]:
        """The best configuration: the user's own with what was found."""
        return applied(self.target.base, self.best.choices, self.ranks, self.limits.free_batch)


def optuna() -> Any:
    """The search library. Raises OneCopyError where it is not installed."""
    try:
        import optuna as library
    except ImportError:
        raise OneCopyError(
            "`onecopy tune` searches with Optuna, which is not installed; run `pip install 'onecopy[tune]'`"
        ) from None
    library.logging.set_verbosity(library.logging.WARNING)
    return library


def tune(
    target: Target,
    ranks: int,
    folder: Path,
    limits: Limits,
    say: Callable[[str], None],
    guesses: list[dict[str, Any]] | None = None,
) -> Study:
    """Search. Every trial is a run of `ranks` local ranks in a folder of its own under `folder`.

    Args:
        guesses: choices to measure before the search, such as a plan's.

    Raises:
        OneCopyError: Optuna is not installed, or the user's own configuration cannot be run at all.
    """
    library = optuna()
    study = Study(target, ranks, [], limits)
    runner = _Runner(study, folder, say)
    first = runner.run({})
    if first.status not in ("measured", "out of memory", "hung"):
        raise OneCopyError(f"the configuration as given {first.status}: {first.detail}")
    space = _space_after(study, first)
    keys = ", ".join(SHORT[name] for name in space.values)
    say(f"{space.size} combinations of {keys or 'nothing'}; at most {limits.trials} runs")
    search = library.create_study(
        direction="maximize", sampler=library.samplers.TPESampler(seed=0, n_startup_trials=6, multivariate=True)
    )
    for guess in [{name: values[0] for name, values in space.values.items()}, *(guesses or [])]:
        search.enqueue_trial({name: value for name, value in guess.items() if value in space.values.get(name, ())})
    asked = 0
    while len(runner.known) < min(limits.trials, space.size) and asked < 20 * limits.trials:
        asked += 1
        question = search.ask()
        choices = {name: question.suggest_categorical(name, values) for name, values in space.values.items()}
        trial = runner.run(choices)
        if trial.samples_per_second is None:
            search.tell(question, state=library.trial.TrialState.FAIL)
        else:
            search.tell(question, trial.samples_per_second)
    return study


def _space_after(study: Study, first: Trial) -> Space:
    """The space, once the first run has shown the model's size, its memory and its batches."""
    target, ranks, limits = study.target, study.ranks, study.limits
    micro, _ = batch_of(target.base, ranks)
    largest = None
    if micro and first.peak_bytes and limits.memory:
        largest = int(micro * limits.memory / first.peak_bytes)  # all of the peak counted as if it grew: a safe guess
    space = space_of(target.base, first.parameters, ranks, limits.free_batch, max(largest, 1) if largest else None)
    batches = {shape[0] for shape in first.inputs if shape}
    if micro and batches and micro not in batches:
        study.notes.append(
            f"the script's batches have {min(batches)} samples, whatever the configuration says ({micro}); the micro-batch is not searched"
        )
        space = space.without(MICRO)
    return space


class _Runner:
    """Runs a choice once, remembers it, and leaves out what must run out of memory."""

    def __init__(self, study: Study, folder: Path, say: Callable[[str], None]) -> None:
        self.study, self.folder, self.say = study, folder, say
        self.known: dict[str, Trial] = {}

    def run(self, choices: dict[str, Any]) -> Trial:
        study = self.study
        config = applied(study.target.base, choices, study.ranks, study.limits.free_batch)
        key = json.dumps(config, sort_keys=True)
        if key in self.known:
            return self.known[key]
        trial = self.known[key] = Trial(len(study.trials) + 1, choices)
        study.trials.append(trial)
        micro = choices.get(MICRO)
        failed = [t for t in study.trials if t.status == "out of memory" and MICRO in t.choices]
        if micro and any(micro >= t.choices[MICRO] for t in failed):
            trial.status, trial.detail = "skipped", "a run with no larger micro-batch ran out of memory"
        else:
            self._measure(trial, config)
        self.say(line_of(trial))
        return trial

    def _measure(self, trial: Trial, config: dict[str, Any]) -> None:
        folder = self.folder / f"trial_{trial.number:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        own = {**config.get("onecopy", {}), "record": str(folder.resolve()), "record_step": 2}
        path = (folder / "config.json").resolve()
        path.write_text(json.dumps({**config, "onecopy": own}, indent=2) + "\n", encoding="utf-8")
        rates = [t.samples_per_second for t in self.study.trials if t.status == "measured" and t.samples_per_second]
        best = max(rates, default=0.0)
        limits = self.study.limits
        run_trial(
            trial, self.study.target.command(path, folder.resolve()), folder, limits.steps, limits.timeout,
            lambda rate: rate < HOPELESS * best,
        )  # fmt: skip


def line_of(trial: Trial) -> str:
    """One trial in a line."""
    what = ", ".join(f"{SHORT[name]} {value:,}" for name, value in trial.choices.items()) or "as given"
    if trial.samples_per_second is None:
        return f"trial {trial.number:>3}  {trial.status:<13} {what}: {trial.detail}"
    peak = f", peak {trial.peak_bytes / 2**20:,.1f} MiB" if trial.peak_bytes else ""
    rate = f"{trial.samples_per_second:>10,.2f} samples/s, step {trial.step_seconds:.4f} s"
    return f"trial {trial.number:>3}  {trial.status:<13} {rate}{peak}  {what}"
