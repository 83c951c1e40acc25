"""Start a benchmark module on local ranks, one thread a rank, and read the JSON lines rank 0 prints."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def on_ranks(module: str, ranks: int, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run `python -m MODULE --worker ARGUMENTS` on `ranks` local ranks; returns rank 0's records in order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["-m", module, "--worker", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"{module} failed on {ranks} ranks")
    return records


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, numbers as they are given."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
