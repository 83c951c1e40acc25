"""`onecopy exec`: run any command, such as `accelerate launch`, with onecopy's `deepspeed` module in its Python processes."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from onecopy.errors import OneCopyError
from onecopy.integrations.deepspeed import launcher

EPILOG = """\
Everything after the first word that is no option belongs to the command. Examples:
  onecopy exec accelerate launch --use_deepspeed --zero_stage 3 --num_processes 2 train.py
  onecopy exec torchrun --nproc_per_node 2 train.py --deepspeed ds.json
  onecopy exec deepspeed --num_gpus 2 train.py --deepspeed_config ds.json
The command and all its child processes find the module through PYTHONPATH, which the command inherits. A DeepSpeed that
is installed is used as it is; --force takes onecopy's module in its place for this command.
"""
STARTUP = Path(__file__).parents[1] / "integrations" / "deepspeed" / "startup"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command, and whose module it gets."""
    parser.usage = "onecopy exec [--force] command [arguments of the command]"
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument(
        "--force", action="store_true", help="take onecopy's deepspeed even where a DeepSpeed is installed"
    )
    parser.add_argument("command", help="a program on the PATH, or its file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the command's own arguments, passed on as they are"
    )


def run(arguments: argparse.Namespace) -> int:
    """Become the command; returns only by an error."""
    os.environ.update(launcher.environment(arguments.force))
    program = shutil.which(arguments.command)
    if program is None:
        raise OneCopyError(f"command '{arguments.command}' is not on the PATH and is no executable file")
    os.environ.update(environment(arguments.force))
    os.execv(program, [arguments.command, *arguments.arguments])


def environment(force: bool) -> dict[str, str]:
    """The variables that make a Python process find onecopy's `deepspeed`."""
    path = [str(STARTUP), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "ONECOPY_DEEPSPEED": "force" if force else "installed",
    }
