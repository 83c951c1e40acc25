"""Starts local ranks of a command, as `torchrun --standalone` would, and returns when all have ended."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def under_launcher() -> bool:
    """Whether this process is already a rank that some launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(command: list[str], ranks: int) -> int:
    """Run `python command` on `ranks` local processes; the exit code is the first failing rank's, 128 plus the signal
    that ended this process, or 0.

    When one rank fails the others are ended. Each rank gets an equal share of the CPUs as threads, unless
    OMP_NUM_THREADS is set.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    if sys.platform == "linux":
        # All ranks are on this machine, so gloo need not find out which interface its host name stands for.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"onecopy-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException as interruption:  # the ranks have been ended
        return 128 + int(interruption.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} failed with exit code {failure.exitcode}; its message is above", file=sys.stderr)
        return failure.exitcode if 0 < failure.exitcode < 256 else 1
    return 0
