"""`onecopy measure-hardware`: measure matrix products, memory and collectives here, for `onecopy plan --hardware`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
Takes about a minute. Nothing else should run meanwhile. Examples:
  onecopy measure-hardware --write my.toml
  onecopy measure-hardware --nproc 2 --name mybox --write my.toml
  onecopy plan llama-7b --gpus 8xmybox --hardware my.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nproc", type=int, metavar="N", help="local ranks (default: the accelerators here, else 1)")
    parser.add_argument("--name", help="what plans call this machine's device (default: its own name)")
    parser.add_argument("--write", metavar="FILE", help="write the TOML file (default: print it)")
    parser.add_argument("--quick", action="store_true", help="small sizes and short times, to try the command")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks; as a rank, measure. Returns the exit code."""
    import torch

    from onecopy.errors import OneCopyError
    from onecopy.train import launch

    ranks = arguments.nproc or (torch.accelerator.device_count() if torch.accelerator.is_available() else 1)
    if ranks < 1:
        raise OneCopyError(f"--nproc is {ranks}; it must be at least 1")
    if ranks > 1 and not launch.under_launcher():
        return launch.run_ranks(["-m", "onecopy", *sys.argv[1:]], ranks)
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    import torch.distributed as dist

    from onecopy.comm.connect import default_device, ensure_process_group
    from onecopy.plan.machine_file import machine_table
    from onecopy.plan.measuring import Effort, measure

    ensure_process_group()
    try:
        speaks = dist.get_rank() == 0
        device = default_device()
        measured = measure(
            device, Effort.of(device, arguments.quick), lambda text: print(text, file=sys.stderr) if speaks else None
        )
        if speaks:
            table = machine_table(measured, arguments.name)
            if arguments.write:
                Path(arguments.write).write_text(table, encoding="utf-8")
                print(f"wrote {arguments.write}")
            else:
                print(table, end="")
    finally:
        dist.destroy_process_group()
    return 0
