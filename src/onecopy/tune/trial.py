"""One trial: a short real run, watched through its record, ended when it is measured, slow, hung or dead."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 2  # steps that do not count: the first makes optimizer state, the second is recorded storage by storage
_FILE = "run_record.jsonl"
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|MemoryError", re.IGNORECASE
)

_SAYS_WHY = re.compile(r"\s*(\[rank\d+\]:)?\s*([\w.]*(Error|Exception)\b|error:|onecopy train:)")


@dataclass
class Trial:
    """What one configuration did.

    Attributes:
        choices: key path to value, what this trial changed.
        status: "measured", "slow" (ended early), "failed", "hung", "out of memory" or "skipped".
        samples_per_second: of all ranks together; None where nothing was measured.
        step_seconds: the median; most_per_second: samples, in the fastest step; peak_bytes: of rank 0, where the record knows it.
        inputs: shapes of the first forward's tensors.
    """

    number: int
    choices: dict[str, Any]
    status: str = "failed"
    samples_per_second: float | None = None
    step_seconds: float | None = None
    most_per_second: float = 0.0
    steps: int = 0
    peak_bytes: int | None = None
    detail: str = ""
    wall_seconds: float = 0.0
    inputs: list[list[int]] = field(default_factory=list)
    parameters: int = 0

    def row(self) -> dict[str, Any]:
        return asdict(self)


def run_trial(
    trial: Trial,
    command: list[str],
    folder: Path,
    steps: int,
    timeout: float,
    hopeless: Callable[[float], bool] = lambda _: False,
) -> Trial:
    """Run `command` until `steps` steps are measured, and fill in `trial`. The run and all it started are ended in any case.

    Args:
        folder: of the trial; its record is `folder/run_record.jsonl`, its output `folder/output.txt`.
        timeout: seconds for the whole trial.
        hopeless: whether so many samples a second in the best of at least two steps are too few to go on.
    """
    started = time.monotonic()
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            trial.status = _watch(trial, process, folder / _FILE, steps, started + timeout, hopeless)
        finally:
            end(process)
    trial.wall_seconds = time.monotonic() - started
    if trial.status == "failed":
        _say_why(trial, process.returncode, folder / "output.txt")
    elif trial.status == "hung":
        trial.detail = f"{trial.steps} steps in {timeout:.0f} seconds; the output is {folder / 'output.txt'}"
    return trial


def _watch(
    trial: Trial,
    process: subprocess.Popen[Any],
    record: Path,
    steps: int,
    deadline: float,
    hopeless: Callable[[float], bool],
) -> str:
    while True:
        ended = process.poll() is not None
        _read(trial, record)
        if trial.steps >= steps:
            return "measured"
        if trial.steps >= 2 and hopeless(trial.most_per_second):
            return "slow"
        if ended:
            return "measured" if process.returncode == 0 and trial.steps else "failed"
        if time.monotonic() > deadline:
            return "hung"
        time.sleep(0.1)


def _read(trial: Trial, record: Path) -> None:
    """Take in what the record says so far."""
    seconds, samples = [], 0
    for line in lines_of(record):
        if line["kind"] == "run":
            trial.inputs, trial.parameters = line["inputs"], line["parameters"]
        elif line["kind"] == "detail":
            trial.peak_bytes = max(trial.peak_bytes or 0, sum(line["peak_bytes_by_category"].values()))
        elif line["step"] > WARM_UP:
            seconds.append(line["seconds"])
            samples = line["samples"]
        if "allocated_peak_bytes" in line:
            trial.peak_bytes = line["allocated_peak_bytes"]
    trial.steps = len(seconds)
    if seconds:
        trial.step_seconds = statistics.median(seconds)
        trial.samples_per_second = samples / trial.step_seconds
        trial.most_per_second = samples / min(seconds)


def lines_of(record: Path) -> Iterator[dict[str, Any]]:
    """The record's whole lines; the last may still be under way."""
    if record.exists():
        for text in record.read_text(encoding="utf-8").splitlines(keepends=True):
            if text.endswith("\n"):
                yield json.loads(text)


def _say_why(trial: Trial, code: int, output: Path) -> None:
    text = output.read_text(encoding="utf-8", errors="replace")
    if _NO_MEMORY.search(text) or code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        trial.status = "out of memory"
    said = [line.strip() for line in text.splitlines() if _SAYS_WHY.match(line)]
    ended = f"ended with exit code {code} after {trial.steps} measured steps"
    if code == 0:
        ended = f"ended after {trial.steps + WARM_UP if trial.steps else 'too few'} steps; give the script more of them"
    trial.detail = f"{said[-1][:200]} ({output})" if said else f"{ended}; the output is {output}"


def end(process: subprocess.Popen[Any]) -> None:
    """End a run with everything it started: ask first, then make sure. Ranks live in sessions of their own, so they are looked up."""
    family = _descendants(process.pid)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            family |= _descendants(process.pid)
            process.kill()
    for member, born in family.items():
        if _stat(member)[1] == born:  # else the number is another process's by now
            try:
                os.kill(member, signal.SIGKILL)
            except ProcessLookupError:
                pass
    process.wait()


def _descendants(pid: int) -> dict[int, str]:
    """Processes that `pid` started, directly or not, with the time of their birth; empty where /proc does not say."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        children.setdefault(_stat(int(entry.name))[0], []).append(int(entry.name))
    found, wait = {}, [pid]
    while wait:
        for child in children.get(wait.pop(), []):
            found[child] = _stat(child)[1]
            wait.append(child)
    return found


def _stat(pid: int) -> tuple[int, str]:
    """(parent, time of birth) of a process; (-1, "") where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[1]), fields[19]
    except (OSError, IndexError):
        return -1, ""
