"""Events (name, value, step) written where the configuration says: TensorBoard, CSV files, Weights & Biases, Comet.

Only rank 0 writes. A monitor that cannot work is said once and left out: nobody loses a run for its curves.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from onecopy.observe.log import warn

Event = tuple[str, Any, int]
"""Name with "/" between its parts, a number or one-element tensor, and the step (in DeepSpeed: samples seen)."""


class Writer(Protocol):
    """One place that events go to."""

    def write(self, name: str, value: float, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Monitor:
    """All writers of a run behind one `write_events`; without writers, as on ranks other than 0, it does nothing."""

    def __init__(self, writers: Iterable[Writer] = ()) -> None:
        self._writers = list(writers)

    @property
    def enabled(self) -> bool:
        """False when events go nowhere, so that the caller need not compute them."""
        return bool(self._writers)

    def write_events(self, events: Iterable[Event], flush: bool = True) -> None:
        """Writes events, reading tensors among them (that waits for the device); a writer that fails is left out."""
        if not self._writers:
            return
        plain = [(name, float(value), int(step)) for name, value, step in events]
        for writer in list(self._writers):
            self._guarded(writer, partial(_write_all, writer, plain, flush))

    def flush(self) -> None:
        """Makes what was written readable by others."""
        for writer in list(self._writers):
            self._guarded(writer, writer.flush)

    def close(self) -> None:
        """Ends all writers; later events go nowhere."""
        for writer in list(self._writers):
            self._guarded(writer, writer.close)
        self._writers.clear()

    def _guarded(self, writer: Writer, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a service raises, training goes on
            self._writers.remove(writer)
            warn(f"{type(writer).__name__} stopped: {type(error).__name__}: {error}. Training goes on without it.")


def monitors_from(config: Any, rank: int) -> Monitor:
    """The monitors that `tensorboard`, `csv_monitor`, `wandb` and `comet` of the configuration enable.

    An empty Monitor on ranks other than 0. One that cannot start is said once, with the remedy, and left out.
    """
    if rank != 0:
        return Monitor()
    writers = []
    for block, make in _MAKERS.items():
        settings = getattr(config, block, None)
        if settings is None or not settings.enabled:
            continue
        try:
            writers.append(make(settings))
        except ImportError as error:
            warn(f"{block}.enabled is true, but {error}; training goes on without it: {_REMEDIES[block]}.")
        except Exception as error:  # a folder that cannot be made, a service that refuses
            warn(f"{block} cannot start: {type(error).__name__}: {error}. Training goes on without it.")
    return Monitor(writers)


class CsvWriter:
    """One file an event name, `output_path/job_name/Train_Samples_lr.csv`, with the columns step and last name part."""

    def __init__(self, settings: Any) -> None:
        self.folder = _folder(settings, "csv_monitor")
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, value: float, step: int) -> None:
        path = self.folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        # Opened for each event: complete at any crash, and a continued run goes on in the same file.
        with path.open("a", newline="") as file:
            rows = csv.writer(file)
            if file.tell() == 0:
                rows.writerow(["step", name.split("/")[-1]])
            rows.writerow([step, value])

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoardWriter:
    """Scalars in `output_path/job_name` through `torch.utils.tensorboard`."""

    def __init__(self, settings: Any) -> None:
        summary_writer = import_module("torch.utils.tensorboard").SummaryWriter
        self.folder = _folder(settings, "tensorboard")
        self._writer = summary_writer(log_dir=str(self.folder))

    def write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases in `project`, `group` and `team`."""

    def __init__(self, settings: Any) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(project=settings.project, group=settings.group, entity=settings.team)

    def write(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value}, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class CometWriter:
    """A Comet experiment; an event name is sent again after `samples_log_interval` steps of its axis."""

    def __init__(self, settings: Any) -> None:
        comet = import_module("comet_ml")
        self._interval = settings.samples_log_interval
        self._last: dict[str, int] = {}
        keys = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        self._experiment = comet.start(**{name: getattr(settings, name) for name in keys})
        if settings.experiment_name is not None:
            self._experiment.set_name(settings.experiment_name)

    def write(self, name: str, value: float, step: int) -> None:
        if name in self._last and step - self._last[name] < self._interval:
            return
        self._last[name] = step
        self._experiment.log_metric(name, value, step=step)

    def flush(self) -> None:
        self._experiment.flush()

    def close(self) -> None:
        self._experiment.end()


_MAKERS: dict[str, Callable[[Any], Writer]] = {
    "tensorboard": TensorBoardWriter,
    "csv_monitor": CsvWriter,
    "wandb": WandbWriter,
    "comet": CometWriter,
}

_REMEDIES = {
    "tensorboard": "pip install tensorboard, or use csv_monitor, which needs nothing",
    "csv_monitor": "this is a fault of the installation",
    "wandb": "pip install wandb, or use csv_monitor, which needs nothing",
    "comet": "pip install comet_ml, or use csv_monitor, which needs nothing",
}


def _folder(settings: Any, default: str) -> Path:
    base = Path(settings.output_path).expanduser() if settings.output_path else Path.home() / default
    return base / str(settings.job_name)


def _write_all(writer: Writer, events: list[tuple[str, float, int]], flush: bool) -> None:
    for name, value, step in events:
        writer.write(name, value, step)
    if flush:
        writer.flush()
