"""The pages in a real browser: no request, no error, dark and light, and no sideways scrolling on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
from onecopy.cli.main import main
from onecopy.errors import PlanError
from onecopy.plan import plan
from onecopy.plan.report import page
from onecopy.plan.run_report import Run, comparison, plan_of, run_page, text
from onecopy.tune.page import page as tune_page
from onecopy.tune.study import Limits, Study
from onecopy.tune.target import Target
from onecopy.tune.trial import Trial
from tests.plan.test_exact import LENGTH, document, gpt
from tests.worlds import world

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Before all of the page's own scripts: errors are kept; after them: what the page looks like is written into the document.
FIRST = "<script>window.problems = []; addEventListener('error', e => problems.push(e.message || String(e)), true);</script>"
LAST = """<script>addEventListener('load', () => setTimeout(() => parent.postMessage({ problems,
requests: performance.getEntriesByType('resource').length, scroll: document.documentElement.scrollWidth, width: innerWidth,
ground: getComputedStyle(document.body).backgroundColor, drawn: document.querySelectorAll('svg path, svg rect, svg circle').length
}, '*'), 50));</script>"""
# A browser's window has a least width, a frame in it has none.
FRAME = """<!doctype html><body><script>addEventListener('message', e => { const d = document.createElement('div'); d.id = 'found';
d.textContent = JSON.stringify(e.data); document.body.append(d); });</script><iframe src="page.html" width="%d" height="900"
style="border:0"></iframe></body>"""


def trained(folder: str) -> None:
    subject = gpt()
    config = {**document(3, "bf16", 1), "onecopy": {"record": folder}}
    engine, *_ = onecopy.initialize(model=subject.build().train(), config=config)
    for _ in range(5):
        engine.backward(subject.loss(engine(**subject.batch(2, LENGTH))))
        engine.step()
    engine.destroy()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    world(2).run(trained, str(folder))
    return Run.load(folder)


@pytest.fixture(scope="module")
def pages(recorded: Run) -> dict[str, str]:
    """Every kind of page, by name."""
    trials = [
        Trial(1, {}, "measured", 10.0, 0.1),
        Trial(2, {"onecopy.slots": 3}, "measured", 12.0, 0.08),
        Trial(3, {"onecopy.slots": 4}),
    ]
    answer = plan(gpt(), "8xA100-80GB", sequence=LENGTH, micro_batch=2)
    return {
        "plan": page(answer),
        "run": run_page(recorded, plan_of(recorded, gpt())),
        "run alone": run_page(recorded, None),
        "tune": tune_page(Study(Target({}, ("",), 0), 2, trials, Limits()), "train.py"),
    }


def look(html: str, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """Open the page in Chromium without a network, and ask it what it shows."""
    assert CHROMIUM is not None
    file = folder / "page.html"
    file.write_text(
        re.sub(r"(<head>)", lambda match: match[1] + FIRST, html, count=1).replace("</body>", LAST + "</body>"),
        encoding="utf-8",
    )
    frame = folder / "frame.html"
    frame.write_text(FRAME % width, encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--window-size=1300,1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=2000", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'<div id="found">(.*?)</div>', done.stdout)
    assert match, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(match[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("name", ["plan", "run", "run alone", "tune"])
def test_pages_in_a_browser(pages: dict[str, str], name: str, tmp_path: Path) -> None:
    light, dark = look(pages[name], tmp_path, 1100, False), look(pages[name], tmp_path, 390, True)
    assert dark["width"] == 390
    for found in (light, dark):
        assert found["problems"] == [] and found["requests"] == 0 and found["drawn"] >= 3, found
        assert found["scroll"] <= found["width"], found
    assert (
        sum(map(int, re.findall(r"\d+", light["ground"])))
        > 600
        > 200
        > sum(map(int, re.findall(r"\d+", dark["ground"])))
    )


def test_a_run_is_compared_with_its_plan(recorded: Run, capsys: pytest.CaptureFixture[str]) -> None:
    beside = plan_of(recorded, gpt())
    rows = {row[0]: row[1:] for row in comparison(recorded, beside)}
    for name in ("slots", "gradients", "masters", "moments"):
        assert rows[f"{name} at the peak"][2] == "+0.00%", name
    assert rows["sent a rank and step"][2] == "+0.00%"
    assert "no plan beside it" in text(recorded, None)
    assert main(["report", str(recorded.folder)]) == 0
    assert "samples/s" in capsys.readouterr().out
    assert (recorded.folder / "report.html").read_text().startswith("<!doctype html>")


def test_records_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="record"):
        Run.load(tmp_path)
    file = tmp_path / "run_record.jsonl"
    file.write_text("not json\n")
    with pytest.raises(PlanError, match="line 1"):
        Run.load(tmp_path)
    file.write_text('{"kind": "run"}\n{"kind": "st')
    with pytest.raises(PlanError, match="no step yet"):
        Run.load(tmp_path)


def test_a_rehearsal_writes_no_record(tmp_path: Path) -> None:
    config = {
        **document(3, "bf16", 1),
        "onecopy": {"record": str(tmp_path / "no"), "trace_step": 1, "trace_path": str(tmp_path / "t.json")},
    }
    with torch.random.fork_rng():
        plan(gpt(), "2xH100", sequence=LENGTH, config=config)
    assert list(tmp_path.iterdir()) == []
