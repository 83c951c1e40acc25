"""`onecopy run`: start a script on local ranks (or as torchrun would) with onecopy's `deepspeed` module."""

from __future__ import annotations

import argparse
import os
import sys

from onecopy.errors import OneCopyError
from onecopy.integrations.deepspeed.launcher import environment

EPILOG = """\
Everything after the script belongs to the script. Options of torchrun go before it. Examples:
  onecopy run --nproc 2 train.py --deepspeed_config ds.json
  onecopy run --nproc 8 finetune.py --deepspeed ds.json --bf16 true
  onecopy run --nnodes 2 --node-rank 0 --nproc 8 --master-addr host0 --master-port 29500 train.py
  onecopy run --nproc 2 -m my_package.train
A DeepSpeed that is installed is used as it is; --force takes onecopy's module in its place for this run.
"""
_BOOTSTRAP = "onecopy.integrations.deepspeed.bootstrap"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb: ours, and every option of the installed torchrun."""
    from torch.distributed.run import get_args_parser

    parser.usage = "onecopy run [--nproc N] [--force] [torchrun options] script.py [arguments of the script]"
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument(
        "--nproc", dest="nproc_per_node", metavar="N", help="ranks on this machine, or auto, cpu, gpu (default 1)"
    )
    parser.add_argument(
        "--force", action="store_true", help="take onecopy's deepspeed even where a DeepSpeed is installed"
    )
    parser.add_argument(
        "--pass-local-rank", action="store_true", help="give the script --local_rank=N, as the deepspeed command does"
    )
    for action in get_args_parser()._actions:
        if not isinstance(action, argparse._HelpAction):
            parser._add_action(action)
    parser.set_defaults(nproc_per_node="1")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks and wait for them. Returns the exit code of the first rank that failed, else 0."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as torchrun

    if arguments.no_python:
        raise OneCopyError(
            "--no-python starts a program that is not Python, which imports no deepspeed; start it with torchrun"
        )
    if not arguments.module and not os.path.isfile(arguments.training_script):
        raise OneCopyError(f"script '{arguments.training_script}' is no file (from folder {os.getcwd()})")
    choice = ("force" if arguments.force else "installed") + ("+local_rank" if arguments.pass_local_rank else "")
    words = [choice, "module" if arguments.module else "script"]
    arguments.training_script_args = [*words, arguments.training_script, *arguments.training_script_args]
    arguments.training_script, arguments.module = _BOOTSTRAP, True
    if _only_this_machine(arguments):
        _stay_on_this_machine(arguments)
    os.environ.update(environment(arguments.force))
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} failed with exit code {failure.exitcode}; its message is above", file=sys.stderr)
        return failure.exitcode if 0 < failure.exitcode < 256 else 1
    return 0


def _only_this_machine(arguments: argparse.Namespace) -> bool:
    """Whether all ranks are here and nothing was said about how they meet."""
    from torch.distributed.run import get_args_parser

    usual_port = get_args_parser().get_default("master_port")  # a number before torch 2.12, None since
    said = arguments.standalone or arguments.rdzv_endpoint or arguments.master_port != usual_port
    return not said and str(arguments.nnodes) in ("1", "1:1") and arguments.rdzv_backend == "static"


def _stay_on_this_machine(arguments: argparse.Namespace) -> None:
    """Meet on a free port of the loopback, so that runs do not disturb each other and no host name is looked up."""
    arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "127.0.0.1:0"
    arguments.rdzv_id = f"onecopy-{os.getpid()}"
    arguments.local_addr = arguments.local_addr or "127.0.0.1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if str(arguments.nproc_per_node).isdigit():
        share = (os.cpu_count() or 1) // max(1, int(arguments.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
