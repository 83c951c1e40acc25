"""`onecopy tune`: measure real short runs and write the fastest configuration found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EPILOG = """\
SCRIPT is a training script; the configuration its arguments name is replaced by each trial's. CONFIG alone trains the small GPT of
`onecopy train`, with what follows as more of its options. Nothing else should run meanwhile. Examples:
  onecopy tune --nproc 2 train.py --deepspeed_config ds.json
  onecopy tune --nproc 2 ds.json --layers 6 --width 256 --data my.txt
A trial is ended when it is measured, clearly slower than the best, or hung; what fails or runs out of memory stands in the table.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.usage = "onecopy tune [options] SCRIPT_OR_CONFIG [arguments of the script]"
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument("target", metavar="SCRIPT_OR_CONFIG", help="a training script (.py), or a DeepSpeed-style JSON")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script, or of `onecopy train`"
    )
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="local ranks of every run (default: %(default)s)"
    )
    parser.add_argument("--config", metavar="FILE", help="the configuration of a script whose arguments name none")
    parser.add_argument("--trials", type=int, default=12, metavar="N", help="runs at most (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps measured a run, after two (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        metavar="SECONDS",
        help="of one run (default: %(default)s)",
    )
    parser.add_argument("--free-batch", action="store_true", help="let the global batch grow with the micro-batch")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="what `onecopy plan` calls the model: its plan is measured first (needs --gpus)",
    )
    parser.add_argument("--gpus", metavar="NxGPU", help="for that plan")
    parser.add_argument("--hardware", metavar="FILE", help="a TOML file with GPUs of your own, for that plan")
    parser.add_argument(
        "--folder", default="runs/tune", metavar="FOLDER", help="trials, table and page (default: %(default)s)"
    )
    parser.add_argument("--write", metavar="FILE", help="the best configuration (default: FOLDER/best.json)")


def run(arguments: argparse.Namespace) -> int:
    """Search, print the table, write the best configuration, the table and the page."""
    from onecopy.errors import OneCopyError
    from onecopy.tune.page import page, table
    from onecopy.tune.study import Limits, optuna, tune
    from onecopy.tune.target import target_for

    for name in ("nproc", "trials", "steps", "timeout"):
        if getattr(arguments, name) <= 0:
            raise OneCopyError(f"--{name} is {getattr(arguments, name)}; it must be positive")
    optuna()
    target = target_for(arguments.target, arguments.nproc, arguments.rest, arguments.config)
    folder = Path(arguments.folder)
    limits = Limits(
        arguments.trials, arguments.steps, arguments.timeout, arguments.free_batch, _memory(arguments.nproc)
    )
    study = tune(
        target, arguments.nproc, folder, limits, lambda text: print(text, flush=True), _guesses(arguments, target.base)
    )
    best = Path(arguments.write) if arguments.write else folder / "best.json"
    best.write_text(json.dumps(study.config(), indent=2) + "\n", encoding="utf-8")
    (folder / "trials.json").write_text(
        json.dumps([trial.row() for trial in study.trials], indent=2) + "\n", encoding="utf-8"
    )
    (folder / "tune.html").write_text(page(study, arguments.target), encoding="utf-8")
    print(table(study))
    print(f"best configuration: {best}\ntable and plot: {folder / 'trials.json'}, {folder / 'tune.html'}")
    return 0


def _memory(ranks: int) -> float:
    """Bytes a rank may use here."""
    import torch

    from onecopy.plan.measuring import memory_of

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return memory_of(accelerator or torch.device("cpu"), ranks)


def _guesses(arguments: argparse.Namespace, base: dict[str, Any]) -> list[dict[str, Any]]:
    """What the plan would choose, where it knows the model."""
    if not arguments.model or not arguments.gpus:
        return []
    from onecopy.plan.planning import plan
    from onecopy.tune.space import MICRO, SLOTS

    stage = base.get("zero_optimization", {}).get("stage", 0)
    answer = plan(arguments.model, arguments.gpus, stage=stage, advise=True, hardware=arguments.hardware)
    fitting = [choice.setting for choice in answer.settings if choice.fits and choice.setting.stage == stage]
    return [{MICRO: setting.micro_batch, SLOTS: setting.slots} for setting in fitting[:2]]
