"""`onecopy report`: a real run's memory, lanes and steps on one page, beside its plan."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EPILOG = """\
The run's record is written by `onecopy train`, and by any run whose configuration has {"onecopy": {"record": "RUN_DIR"}}. Examples:
  onecopy report runs/train
  onecopy report RUN_DIR --model gpt2 --gpus 2xmybox --hardware my.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN_DIR", help="the folder that holds the run's record")
    parser.add_argument("--html", metavar="FILE", help="the page (default: RUN_DIR/report.html)")
    parser.add_argument(
        "--model", metavar="MODEL", help="what `onecopy plan` calls the model (known for `onecopy train`)"
    )
    parser.add_argument(
        "--gpus", metavar="NxGPU", help="where it ran, for the planned time (default: what the run says)"
    )
    parser.add_argument("--hardware", metavar="FILE", help="a TOML file with GPUs of your own")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Read the record, plan the same run, print both, write the page."""
    from onecopy.plan.hardware import machine
    from onecopy.plan.run_report import Run, comparison, plan_of, run_page, subject_of, text

    recorded = Run.load(arguments.run)
    subject = subject_of(recorded, arguments.model)
    where = machine(arguments.gpus, file=arguments.hardware) if arguments.gpus else None
    beside = None if subject is None else plan_of(recorded, subject, where)
    target = Path(arguments.html) if arguments.html else recorded.folder / "report.html"
    target.write_text(run_page(recorded, beside), encoding="utf-8")
    print(json.dumps(comparison(recorded, beside), indent=2) if arguments.json else text(recorded, beside))
    if not arguments.json:
        print(f"\npage: {target}")
    return 0
