"""Runs a command as a user would, and ends everything it started when it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_python(*words: str, folder: Path = ROOT, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
    """`python words...` in `folder`, with onecopy importable, one thread a process and no launcher's variables.

    Raises subprocess.TimeoutExpired after `timeout` seconds, when its processes have been killed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    path = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=path.rstrip(os.pathsep))
    command = [sys.executable, *words]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its ranks can be ended with it
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
