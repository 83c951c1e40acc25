"""The effective configuration as people see it: the table, the command, the examples and the documentation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onecopy.config
from onecopy.cli import main as command
from onecopy.config import Config, features, load
from onecopy.config.keys import keys_of
from onecopy.config.kinds import Block
from onecopy.config.reference import refresh

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ds_config_zero3.json"
SOURCE = Path(onecopy.config.__file__).parents[2]


def _fresh(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_the_widely_copied_configuration_is_accepted_with_notes() -> None:
    config = load(EXAMPLE, world_size=2)
    assert (config.train_batch_size, config.zero.stage, config.fp16.initial_scale) == (64, 3, 65536.0)
    assert config.zero.prefetch_bucket_size == 500_000_000
    report = config.report()
    assert "initial_loss_scale" in report.split("notes")[1]
    written = [*_leaves(json.loads(EXAMPLE.read_text()))]
    judged = {one.key_path for one in config.findings}
    assert set(written) <= judged


def _leaves(block: dict[str, object], path: str = "") -> list[str]:
    found = []
    for name, value in block.items():
        found += _leaves(value, f"{path}{name}.") if isinstance(value, dict) else [f"{path}{name}"]
    return found


def test_the_table_shows_the_clipping_default_and_the_batch_sizes() -> None:
    report = load({"train_micro_batch_size_per_gpu": 2}, world_size=3).report()
    assert re.search(r"gradient_clipping +1.0 \(default\) +honoured", report)
    assert re.search(r"train_batch_size +6 \(derived\) +honoured ", report)
    assert "= 2 x 1 x world size 3 (given)" in " ".join(report.split())
    assert all(len(line) <= 120 for line in report.splitlines())


def test_every_default_can_be_shown() -> None:
    report = load({"train_batch_size": 2}, world_size=1).report(every_default=True)
    for _, key in keys_of(Config):
        assert key.name in report or isinstance(key.kind, Block)
    assert re.search(r"stage3_prefetch_bucket_size +50_000_000 \(default\)", report)


def test_check_prints_the_table_and_returns_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", str(EXAMPLE), "--world-size", "2"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("ZeRO stage 3 in fp16 on 2 ranks")
    assert "notes" in output.out and not output.err
    assert command.main(["check", str(EXAMPLE), "--all"]) == 0
    assert "(default)" in capsys.readouterr().out


def test_check_prints_problems_and_returns_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 3, "zero_optimization": {"stage": 5}, "fp16": {"enable": true}}')
    assert command.main(["check", str(path), "--world-size", "2"]) == 1
    output = capsys.readouterr()
    assert "3 problems" in output.err
    assert "zero_optimization.stage = 5" in output.err and "Traceback" not in output.err
    assert "refused" in output.out
    assert command.main(["check", str(tmp_path / "dss.json")]) == 1
    assert "file not found" in capsys.readouterr().err


def test_importing_needs_no_torch_and_gives_no_warning() -> None:
    # The package itself is replaced by an empty one, because its public face has the engine, and that needs torch.
    script = """
import sys, types
package = sys.modules["onecopy"] = types.ModuleType("onecopy")
package.__path__ = [sys.argv[1] + "/onecopy"]
import onecopy.config, onecopy.cli.main
assert set(onecopy.cli.main.verbs()) >= {"check"}
onecopy.config.load({"train_batch_size": 8, "optimizer": {"type": "AdamW"}}, world_size=1).report()
assert "torch" not in sys.modules
"""
    result = _fresh("-W", "error", "-c", script, str(SOURCE))
    assert result.returncode == 0, result.stderr
    result = _fresh("-W", "error", "-c", "import onecopy.config")
    assert result.returncode == 0, result.stderr


def test_the_command_lists_its_verbs() -> None:
    result = _fresh("-m", "onecopy", "--help")
    assert result.returncode == 0
    assert re.search(r"check +print the effective configuration", result.stdout)
    assert _fresh("-m", "onecopy", "chekc").returncode == 2


def test_the_documentation_has_every_key() -> None:
    page = ROOT / "docs" / "config.md"
    text = page.read_text(encoding="utf-8")
    assert refresh(text) == text, "run: python -m onecopy.config.reference docs/config.md"
    for name in (*features.REFUSED, *features.IGNORED, *features.OBSERVERS, "initial_loss_scale", "unit_classes"):
        assert f"`{name}`" in text
