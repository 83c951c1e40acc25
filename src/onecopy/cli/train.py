"""`onecopy train`: train a small GPT on text, on local ranks it starts itself or as a rank of torchrun."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
from typing import Any

from onecopy.errors import OneCopyError

EPILOG = """\
Without --config and model options this is nanoGPT's character model for one CPU, under ZeRO-3. Examples:
  onecopy train --nproc 2 --data my.txt
  onecopy train --nproc 2 --config examples/ds_config_zero3.json --set optimizer.params.lr=0.001 --steps 300
  onecopy train --nproc 2 --resume runs/train --steps 3000
  torchrun --nproc_per_node=2 -m onecopy train --data my.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # What is not given is absent, so that --resume keeps it from the earlier run.
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="local ranks to start (default 1)")
    parser.add_argument(
        "--resume", metavar="RUN", help="go on with an earlier run's folder, its settings and checkpoint"
    )
    parser.add_argument("--folder", dest="run", metavar="FOLDER", help="where the run is kept (default runs/train)")

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--config", metavar="FILE", help="DeepSpeed-style JSON (default: ZeRO-3, AdamW, 12 sequences a step)"
    )
    engine.add_argument(
        "--set", action="append", dest="assignments", metavar="KEY=VALUE", help="override one key of it"
    )
    engine.add_argument("--stage", type=int, choices=range(4), help="short for --set zero_optimization.stage=N")

    text = parser.add_argument_group("text")
    text.add_argument("--data", metavar="PATH", help="a text file, or a folder of *.txt (default: Shakespeare's works)")
    text.add_argument("--vocabulary", help="character (default), or bpe:SIZE to learn byte pairs from the text")

    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, help="blocks (default 4)")
    model.add_argument("--heads", type=int, help="attention heads (default 4)")
    model.add_argument("--width", type=int, help="size of the residual stream (default 128)")
    model.add_argument("--context", type=int, help="tokens in a sequence (default 64)")
    model.add_argument("--dropout", type=float, help="dropout probability (default 0)")
    model.add_argument(
        "--bias", action=argparse.BooleanOptionalAction, help="biases in linear layers and norms (default no)"
    )
    model.add_argument("--tied", action=argparse.BooleanOptionalAction, help="share embedding and head (default yes)")

    steps = parser.add_argument_group("steps")
    steps.add_argument("--steps", type=int, help="optimizer steps in all (default 2000)")
    steps.add_argument("--seed", type=int, help="seed of weights, batches and sample (default 1337)")
    steps.add_argument("--log-every", type=int, metavar="N", help="steps between training losses (default 10)")
    steps.add_argument("--evaluate-every", type=int, metavar="N", help="steps between evaluations (default 250)")
    steps.add_argument("--evaluation-sequences", type=int, metavar="N", help="evaluate on N sequences (default: all)")
    steps.add_argument(
        "--save-every", type=int, metavar="N", help="steps between checkpoints (default: only at the end)"
    )

    sample = parser.add_argument_group("generated text")
    sample.add_argument("--prompt", help="what it begins with (default a line break)")
    sample.add_argument("--sample", type=int, metavar="N", help="tokens to generate (default 400)")
    sample.add_argument("--temperature", type=float, help="0 takes the likeliest token (default 0.8)")
    sample.add_argument("--top-k", type=int, help="choose among the K likeliest tokens (default 200)")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks and wait for them; as a rank, or with --nproc 1, train here. Returns the exit code."""
    from onecopy.config import load
    from onecopy.train import launch

    if arguments.nproc < 1:
        raise OneCopyError(f"--nproc is {arguments.nproc}; it must be at least 1")
    if arguments.nproc > 1 and not launch.under_launcher():
        load(settings_from(arguments).config, arguments.nproc)  # a mistake is told once, before ranks start
        return launch.run_ranks(["-m", "onecopy", *sys.argv[1:]], arguments.nproc)

    import torch.distributed as dist

    from onecopy.train.loop import train

    try:
        train(settings_from(arguments), resume="resume" in arguments)
    except OneCopyError as error:
        # Every rank raises the same; one of them says it.
        if os.environ.get("RANK", "0") == "0":
            print(f"onecopy train: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def settings_from(arguments: argparse.Namespace) -> Any:
    """The run's settings: defaults or the resumed run's, with the given options on top. Raises OneCopyError."""
    from onecopy.config.sources import read_source
    from onecopy.train.settings import Settings, override

    given = vars(arguments)
    settings = Settings.load(given["resume"]) if "resume" in given else Settings()
    names = {field.name for field in dataclasses.fields(Settings)} - {"config"}
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if name in names})
    if "config" in given:
        settings.config = copy.deepcopy(read_source(given["config"]))
    if "stage" in given:
        override(settings.config, f"zero_optimization.stage={given['stage']}")
    for assignment in given.get("assignments", []):
        override(settings.config, assignment)
    return settings
