"""The `deepspeed` command's arguments, for ranks that `onecopy run` starts: on this machine, or on each of several by hand.

Options that reach other machines by themselves (pdsh, mpirun) are refused; `--no_ssh` with `--node_rank` on each one works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = Path(__file__).parent / "commands"


def environment(force: bool) -> dict[str, str]:
    """The variables with which a program finds the `deepspeed` command; an installed DeepSpeed's own comes first without `force`."""
    path = os.environ.get("PATH", "").split(os.pathsep)
    kept = [entry for entry in path if entry and entry != str(COMMANDS)]
    found = [str(COMMANDS), *kept] if force else [*kept, str(COMMANDS)]
    return {"PATH": os.pathsep.join(found), "ONECOPY_PYTHON": sys.executable}


def parser() -> argparse.ArgumentParser:
    """DeepSpeed's options, those that it documents for a script's start."""
    made = argparse.ArgumentParser(
        prog="deepspeed",
        description="Start a script on this machine's ranks with onecopy's deepspeed module.",
        allow_abbrev=False,
    )
    made.add_argument(
        "-H", "--hostfile", default="/job/hostfile", help="lines 'host slots=N'; read for N of this machine"
    )
    made.add_argument("-i", "--include", default="", help="devices, as 'localhost:0,2'")
    made.add_argument("-e", "--exclude", default="", help="devices to leave out, as 'localhost:1'")
    made.add_argument("--num_nodes", type=int, default=-1, help="machines, each started by hand with --node_rank")
    made.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on this machine")
    made.add_argument(
        "--master_port", type=int, default=None, help="default 29500 over several machines, else a free one"
    )
    made.add_argument("--master_addr", default="", help="the first machine's name")
    made.add_argument("--node_rank", type=int, default=-1, help="this machine's number")
    made.add_argument("--launcher", default="pdsh", help="refused where it would start other machines")
    made.add_argument("--launcher_args", default="", help="ignored")
    made.add_argument("--module", action="store_true", help="the script is a module's name")
    made.add_argument("--no_python", action="store_true", help="refused: such a program imports no deepspeed")
    made.add_argument("--no_local_rank", action="store_true", help="leave --local_rank=N out of the script's arguments")
    for flag in ("--no_ssh", "--no_ssh_check", "--force_multi", "--bind_cores_to_rank", "-q"):
        made.add_argument(flag, action="store_true", help="accepted")
    for option in ("--save_pid", "--bind_core_list", "--ssh_port", "--venv_script", "--log_level"):
        made.add_argument(option, nargs="?" if option == "--save_pid" else None, help="accepted and ignored")
    made.add_argument("--enable_each_rank_log", metavar="DIR", help="write what each rank prints into this folder")
    made.add_argument("--autotuning", choices=["tune", "run"], default="", help="refused: `onecopy tune`")
    made.add_argument("user_script", help="the script")
    made.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return made


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    return parser().parse_args(args)


def run_words(options: argparse.Namespace) -> list[str]:
    """The same as arguments of `onecopy run`. SystemExit, with a sentence, for what it cannot do."""
    if options.autotuning:
        raise SystemExit("deepspeed: --autotuning is not offered by onecopy; use `onecopy tune`")
    nodes = max(1, options.num_nodes)
    if nodes > 1 and options.node_rank < 0:
        raise SystemExit(
            f"deepspeed: --num_nodes {nodes} without --node_rank would start other machines through {options.launcher}, which "
            "onecopy does not do; run the command on each machine with --node_rank and --master_addr"
        )
    words = ["--force", "--nproc", str(_ranks(options))]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--node-rank", str(options.node_rank)]
        words += [
            "--master-addr",
            options.master_addr or "localhost",
            "--master-port",
            str(options.master_port or 29500),
        ]
    elif options.master_port is not None:
        words += ["--master-port", str(options.master_port)]
    if options.enable_each_rank_log:
        words += ["--log-dir", options.enable_each_rank_log, "--redirects", "3"]
    if options.no_python:
        words.append("--no-python")
    if options.module:
        words.append("-m")
    if not options.no_local_rank:
        words.append("--pass-local-rank")
    return [*words, options.user_script, *options.user_args]


def _ranks(options: argparse.Namespace) -> int:
    """Ranks on this machine: as said, as many as chosen devices, as the hostfile's first line says, or one a device."""
    if options.num_gpus > 0:
        return int(options.num_gpus)
    return len(chosen_devices(options)) or _slots(options.hostfile) or _device_count()


def chosen_devices(options: argparse.Namespace) -> list[str]:
    """The numbers of the devices to use; none where all are. SystemExit if all are left out."""
    left_out = _devices(options.exclude)
    if options.include or not left_out:
        return _devices(options.include)
    every = map(str, range(_slots(options.hostfile) or _device_count()))
    found = [number for number in every if number not in left_out]
    if not found:
        raise SystemExit(f"deepspeed: --exclude {options.exclude} leaves no device of this machine")
    return found


def _devices(text: str) -> list[str]:
    """The device numbers of 'localhost:0,2'. SystemExit if there are several machines."""
    if "@" in text:
        raise SystemExit(
            f"deepspeed: '{text}' names several machines; run the command on each of them with --node_rank"
        )
    return [number for number in text.partition(":")[2].split(",") if number]


def _slots(hostfile: str) -> int:
    path = Path(hostfile)
    if not path.is_file():
        return 0
    lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    slots = [int(word.partition("=")[2]) for line in lines for word in line if word.startswith("slots=")]
    if len(slots) > 1:
        raise SystemExit(
            f"deepspeed: {hostfile} names several machines; run the command on each of them with --node_rank"
        )
    return slots[0] if slots else 0


def _device_count() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 1


def main(args: Sequence[str] | None = None) -> None:
    """The command: start the ranks, and exit as they did."""
    options = parse_args(args)
    variables = dict(os.environ)
    chosen = chosen_devices(options)
    if chosen:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    raise SystemExit(subprocess.call([sys.executable, "-m", "onecopy", "run", *run_words(options)], env=variables))


if __name__ == "__main__":
    main()
