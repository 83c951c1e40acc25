"""Events reach the files, only from rank 0, and a broken monitor never stops a run."""

import csv
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from onecopy.observe.monitor import Monitor, monitors_from

OFF = SimpleNamespace(enabled=False)


def config(**blocks):
    return SimpleNamespace(**{"tensorboard": OFF, "csv_monitor": OFF, "wandb": OFF, "comet": OFF, **blocks})


def folder_block(path):
    return SimpleNamespace(enabled=True, output_path=str(path), job_name="job")


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_layout_and_a_continued_run(tmp_path):
    settings = config(csv_monitor=folder_block(tmp_path))
    first = monitors_from(settings, rank=0)
    assert first.enabled
    first.write_events([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train loss", torch.tensor(2.0), 8)])
    first.close()
    second = monitors_from(settings, rank=0)
    second.write_events([("Train/Samples/lr", 0.25, 16)])
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.5"], ["16", "0.25"]]
    assert rows(tmp_path / "job" / "Train_Samples_train_loss.csv") == [["step", "train loss"], ["8", "2.0"]]


def test_other_ranks_write_nothing(tmp_path):
    monitor = monitors_from(config(csv_monitor=folder_block(tmp_path)), rank=1)
    assert not monitor.enabled
    monitor.write_events([("a", 1.0, 1)])
    assert list(tmp_path.iterdir()) == []


def test_an_empty_path_means_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monitors_from(config(csv_monitor=folder_block("")), rank=0).write_events([("a", 1.0, 1)])
    assert (tmp_path / "csv_monitor" / "job" / "a.csv").exists()


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = monitors_from(config(tensorboard=folder_block(tmp_path)), rank=0)
    monitor.write_events([("Train/Samples/lr", 0.5, 8)])
    monitor.close()
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("Train/Samples/lr")] == [(8, 0.5)]


@pytest.mark.parametrize(
    ("block", "module", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("comet", "comet_ml", "comet_ml"),
    ],
)
def test_a_missing_package_is_one_note_and_no_error(block, module, package, monkeypatch, caplog, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with caplog.at_level(logging.WARNING, logger="onecopy"):
        monitor = monitors_from(config(**{block: folder_block(tmp_path)}), rank=0)
        monitor.write_events([("a", 1.0, 1)])
    assert len(caplog.records) == 1
    assert f"{block}.enabled" in caplog.text and f"pip install {package}" in caplog.text


def test_an_impossible_folder_is_one_note_and_the_others_go_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    wandb = SimpleNamespace(enabled=False)
    settings = config(csv_monitor=folder_block(tmp_path / "file"), wandb=wandb)
    with caplog.at_level(logging.WARNING, logger="onecopy"):
        assert not monitors_from(settings, rank=0).enabled
    assert "csv_monitor cannot start" in caplog.text and "file" in caplog.text


def test_a_writer_that_fails_is_left_out(caplog):
    class Broken:
        def write(self, name, value, step):
            raise OSError("disk full")

    class Working:
        seen: list = []  # noqa: RUF012

        def write(self, name, value, step):
            self.seen.append((name, value, step))

        def flush(self):
            pass

    monitor = Monitor([Broken(), Working()])
    with caplog.at_level(logging.WARNING, logger="onecopy"):
        monitor.write_events([("a", 1, 1)])
        monitor.write_events([("a", 2, 2)])
    assert len(caplog.records) == 1 and "disk full" in caplog.text
    assert Working.seen == [("a", 1.0, 1), ("a", 2.0, 2)]


def test_wandb_and_comet_are_called_as_their_libraries_want(monkeypatch):
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    def start(**kwargs):
        calls.append(("start", (), kwargs))
        return Recorder()

    wandb, comet = ModuleType("wandb"), ModuleType("comet_ml")
    wandb.init = comet.start = start
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    keys = dict.fromkeys(("api_key", "workspace", "experiment_key", "mode", "online"))
    settings = config(
        wandb=SimpleNamespace(enabled=True, project="p", group="g", team="t"),
        comet=SimpleNamespace(enabled=True, project="p", samples_log_interval=10, experiment_name="n", **keys),
    )
    monitor = monitors_from(settings, rank=0)
    for step in (1, 5, 11):
        monitor.write_events([("a", 1.0, step)])
    monitor.close()
    assert calls[0] == ("start", (), {"project": "p", "group": "g", "entity": "t"})
    assert [call[1] for call in calls if call[0] == "log"] == [({"a": 1.0},)] * 3
    assert [call[2]["step"] for call in calls if call[0] == "log_metric"] == [1, 11]
    assert ("set_name", ("n",), {}) in calls
    assert [call[0] for call in calls if call[0] in ("finish", "end")] == ["finish", "end"]
