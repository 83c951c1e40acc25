"""What is said, how often, and by whom."""

import logging
import os
import subprocess
import sys

import pytest

from onecopy.observe.log import SkippedSteps, forget_said, log_once, note, rank_zero, warn


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, caplog):
    monkeypatch.delenv("RANK", raising=False)
    caplog.set_level(logging.INFO, logger="onecopy")
    forget_said()


def test_once_for_each_key(caplog):
    assert [log_once("a", "hello"), log_once("a", "hello"), log_once(("a", 1), "again")] == [True, False, True]
    assert [record.getMessage() for record in caplog.records] == ["hello", "again"]


def test_other_ranks_are_silent_unless_asked(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert not rank_zero()
    note("no")
    warn("no")
    assert log_once("key", "no") and not log_once("key", "no")
    warn("yes", every_rank=True)
    assert [record.getMessage() for record in caplog.records] == ["rank 1: yes"]


def test_percent_signs_are_plain_text(caplog):
    warn("100% of %s")
    assert caplog.records[0].getMessage() == "100% of %s"


def test_the_first_skip_is_heard_at_once_then_one_in_every_so_many_steps(caplog):
    skips = SkippedSteps(every=10)
    heard = [step for step in range(1, 36) if step != 4 and skips.skipped(step, "Scale 8 to 4.")]
    assert heard == [1, 11, 21, 31]
    assert skips.total == 34
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert "Step 1 was skipped" in first and "in all" not in first and first.endswith("Scale 8 to 4.")
    assert "9 skipped since the last warning, 10 in all" in second


def test_rare_skips_are_all_heard():
    skips = SkippedSteps(every=10)
    assert [skips.skipped(step) for step in (5, 50, 90)] == [True] * 3


@pytest.mark.parametrize("setup", ["", "import logging; logging.basicConfig(); "])
def test_heard_once_on_stderr_with_and_without_logging_set_up(setup):
    code = f"{setup}from onecopy.observe.log import note, warn; warn('careful'); note('fine')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == ""
    assert result.stderr.count("careful") == 1
    assert result.stderr.count("fine") == 1
