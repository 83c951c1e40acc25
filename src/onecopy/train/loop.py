"""One training run: text, model, engine, steps, evaluations, checkpoint and a sample of what was learned."""

from __future__ import annotations

import csv
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onecopy
from onecopy.comm.connect import ensure_process_group
from onecopy.errors import OneCopyError
from onecopy.train import progress
from onecopy.train.data import Corpus, Draw, evaluation_starts, prepare, sequences
from onecopy.train.model import GPT, GPTConfig, parameter_groups
from onecopy.train.settings import Settings


@dataclass(frozen=True, slots=True)
class Result:
    """What a run ended with; the same on every rank."""

    step: int
    training_loss: float
    validation_loss: float
    sample: str
    checkpoint: str


def train(settings: Settings, resume: bool = False) -> Result:
    """Train as the settings say, on all ranks of the launcher's world (or alone). Collective.

    Raises OneCopyError on every rank when the text or the configuration cannot be used.
    """
    ensure_process_group()
    corpus = _shared_corpus(settings)
    run = Run(settings, corpus)
    try:
        result = run.go(resume)
    except _ToldOnAllRanks:
        run.engine.destroy()
        raise
    # After any other error this rank may be the only one that has it, and destroying takes all of them.
    run.engine.destroy()
    return result


class _ToldOnAllRanks(OneCopyError):
    """A mistake that every rank finds at the same place, outside a step."""


def _shared_corpus(settings: Settings) -> Corpus:
    """Rank 0 prepares the text, then every rank opens it; rank 0's error is raised on all."""
    folder = settings.folder / "text"
    problem: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            prepare(settings.data, settings.vocabulary, folder)
        except OneCopyError as error:
            problem[0] = error
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]
    return Corpus.open(folder, settings.context)


class Run:
    """The engine and everything a run needs beside it."""

    def __init__(self, settings: Settings, corpus: Corpus) -> None:
        self.settings = settings
        self.corpus = corpus
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)
        shape = {
            name: getattr(settings, name) for name in ("context", "layers", "heads", "width", "dropout", "bias", "tied")
        }
        self.model = GPT(GPTConfig(vocabulary_size=corpus.vocabulary.size, **shape))
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        decay = settings.config.get("optimizer", {}).get("params", {}).get("weight_decay", 0.0)
        groups = parameter_groups(self.model, decay)
        self.engine, *_ = onecopy.initialize(model=self.model, model_parameters=groups, config=self._recorded(settings))
        torch.manual_seed(settings.seed + 1 + self.rank)  # dropout differs from rank to rank, weights do not
        self.draw = Draw(
            settings.context,
            self.engine.train_micro_batch_size_per_gpu(),
            self.engine.gradient_accumulation_steps(),
            self.rank,
            self.world_size,
            settings.seed,
        )

    @staticmethod
    def _recorded(settings: Settings) -> dict[str, Any]:
        """The configuration, with a record of the run in its folder for `onecopy report`."""
        own = settings.config.get("onecopy", {})
        return {**settings.config, "onecopy": {"record": str(settings.folder), **own}}

    def go(self, resume: bool) -> Result:
        """Train, evaluate, save and sample. Collective."""
        settings, engine = self.settings, self.engine
        if self.rank == 0:
            settings.save()
        first_step = self._load() if resume else 0
        if first_step >= settings.steps:
            raise _ToldOnAllRanks(f"the run has made {first_step} steps already; give --steps more than that to go on")
        curve = Curve(settings.folder / "curve.csv", keep_before=first_step, active=self.rank == 0)
        started = time.perf_counter()
        clock = progress.Clock()
        total, count, first_loss = torch.zeros((), device=engine.device), 0, float("nan")
        validation = float("nan")
        with progress.Display(settings.steps, first_step, quiet=self.rank != 0) as display:
            display.say(self._headline(first_step))
            for step in range(first_step + 1, settings.steps + 1):
                total += self._step(step - 1)
                count += 1
                clock.count(engine.train_batch_size() * settings.context)
                last = step == settings.steps
                if step == first_step + 1 or step % settings.log_every == 0 or last:
                    loss = self._mean(total, count)
                    total, count = torch.zeros_like(total), 0
                    reading = progress.reading_of(engine, step, loss, clock.read())
                    first_loss = loss if step == first_step + 1 else first_loss
                    display.show(reading)
                    curve.add(step, "train", loss, reading.learning_rate)
                if step % settings.evaluate_every == 0 or last:
                    paused = time.perf_counter()
                    validation = self.evaluate()
                    display.say(f"step {step:>5}  validation loss {validation:.4f}")
                    curve.add(step, "validation", validation, reading.learning_rate)
                    clock.pause(time.perf_counter() - paused)
                if last or (settings.save_every and step % settings.save_every == 0):
                    checkpoint = self._save()
        sample = self.sample()
        seconds = time.perf_counter() - started
        steps = settings.steps - first_step
        display.console.print(progress.summary(reading, first_loss, validation, steps, seconds))
        display.console.print(progress.sample_panel(sample))
        self._say_how_to_continue(display, checkpoint)
        return Result(settings.steps, loss, validation, sample, checkpoint)

    def _step(self, step: int) -> torch.Tensor:
        """One window of micro-batches; returns the mean loss of this rank's sequences."""
        total = torch.zeros((), device=self.engine.device)
        window = self.draw.window(self.corpus.train, step)
        for tokens, targets in window:
            loss = self.engine(tokens.to(self.engine.device), targets.to(self.engine.device))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        return total / len(window)

    def _mean(self, total: torch.Tensor, count: int) -> float:
        """The mean over steps and ranks. Collective."""
        mean = total.double() / count
        dist.all_reduce(mean)
        return mean.item() / self.world_size

    def evaluate(self) -> float:
        """The mean loss on the validation text. Collective; every rank calls forward equally often."""
        starts = evaluation_starts(self.corpus.validation, self.settings.context, self.settings.evaluation_sequences)
        batch = max(1, 4096 // self.settings.context)
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        self.engine.eval()
        with torch.no_grad():
            for begin in range(0, len(starts), batch * self.world_size):
                mine = starts[begin : begin + batch * self.world_size][self.rank :: self.world_size]
                # A rank without sequences at the end still takes part in the gathers, with one that does not count.
                tokens, targets = sequences(
                    self.corpus.validation, mine if len(mine) else starts[:1], self.settings.context
                )
                loss = self.engine(tokens.to(self.engine.device), targets.to(self.engine.device))
                sums += torch.stack([loss.double() * len(mine), torch.tensor(float(len(mine)), device=loss.device)])
        self.engine.train()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def sample(self) -> str:
        """Generated text after the prompt. Collective; the same on every rank."""
        settings = self.settings
        device = self.engine.device
        prompt = torch.from_numpy(self.corpus.vocabulary.encode(settings.prompt).astype("int64"))[None].to(device)
        generator = torch.Generator(device=device).manual_seed(settings.seed)
        self.engine.eval()
        tokens = self.model.generate(prompt, settings.sample, settings.temperature, settings.top_k, generator)
        self.engine.train()
        return self.corpus.vocabulary.decode(tokens[0].tolist())

    def _headline(self, first_step: int) -> str:
        settings, engine = self.settings, self.engine
        continued = f", continued at step {first_step}" if first_step else ""
        return (
            f"{self.parameters:,} parameters, {self.corpus.vocabulary.size} tokens in the vocabulary, "
            f"{len(self.corpus.train):,} tokens of text\n"
            f"ZeRO stage {engine.zero_optimization_stage()} on {self.world_size} ranks, "
            f"{engine.train_batch_size()} sequences of {settings.context} tokens a step\n"
            f"run in {settings.run}{continued}"
        )

    def _save(self) -> str:
        folder = self.settings.folder / "checkpoints"
        self.engine.save_checkpoint(str(folder))
        return str(folder / (folder / "latest").read_text().strip())

    def _load(self) -> int:
        folder = self.settings.folder / "checkpoints"
        path, _ = self.engine.load_checkpoint(str(folder))
        if path is None:
            raise _ToldOnAllRanks(f"there is no complete checkpoint in {folder}; start the run without --resume")
        return int(self.engine.global_steps)

    def _say_how_to_continue(self, display: progress.Display, checkpoint: str) -> None:
        program = ["onecopy"] if shutil.which("onecopy") else [_short(sys.executable), "-m", "onecopy"]
        beside = Path(sys.executable).with_name("onecopy")
        if not shutil.which("onecopy") and beside.exists():
            program = [_short(str(beside))]
        more = self.settings.steps + max(1, self.settings.steps // 2)
        command = [
            *program,
            "train",
            "--nproc",
            str(self.world_size),
            "--resume",
            self.settings.run,
            "--steps",
            str(more),
        ]
        display.say(f"checkpoint: {checkpoint}\ncontinue:   {shlex.join(command)}")


def _short(path: str) -> str:
    """A path as seen from here, where that is shorter."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


class Curve:
    """The run's `curve.csv`: step, which loss, value, learning rate. A resumed run replaces what followed its start."""

    def __init__(self, path: Path, keep_before: int, active: bool) -> None:
        self._path = path if active else None
        if not active:
            return
        rows = []
        if keep_before and path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.reader(file) if row and row[0].isdigit() and int(row[0]) <= keep_before]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["step", "kind", "loss", "learning_rate"], *rows])

    def add(self, step: int, kind: str, loss: float, learning_rate: float) -> None:
        """Append one value."""
        if self._path is not None:
            with self._path.open("a", newline="") as file:
                csv.writer(file).writerow([step, kind, repr(loss), repr(learning_rate)])
