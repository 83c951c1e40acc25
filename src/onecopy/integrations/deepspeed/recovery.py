"""`zero_to_fp32.py`, which lies beside the checkpoints that are saved through the `deepspeed` module, and its arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from onecopy.checkpoint import convert_zero_checkpoint_to_fp32_state_dict
from onecopy.engine import Engine
from onecopy.observe.log import warn

NAME = "zero_to_fp32.py"
_SCRIPT = '''#!/usr/bin/env python3
"""Write the fp32 weights of a checkpoint in this folder: zero_to_fp32.py . OUTPUT_DIR (see --help, and `onecopy export`)."""

from onecopy.integrations.deepspeed.recovery import main

main()
'''


def leave_scripts(engine: Engine) -> None:
    """Let the saves of an engine under ZeRO leave the script in the folder of checkpoints, as DeepSpeed's do."""
    if engine.zero_optimization_stage() > 0:
        engine.after_save = _leave


def _leave(save_dir: str | os.PathLike[str]) -> None:
    script = Path(save_dir).expanduser() / NAME
    try:
        if not script.exists():
            script.write_text(_SCRIPT)
            script.chmod(0o755)
    except OSError as error:  # the checkpoint is complete without it
        warn(f"{script} cannot be written: {error}; `onecopy export` does the same")


def main(arguments: Sequence[str] | None = None) -> None:
    """DeepSpeed's command line: a folder of checkpoints, and a folder for the weights."""
    parser = argparse.ArgumentParser(prog=NAME, description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that holds the tags")
    parser.add_argument("output_dir", help="where pytorch_model.bin (or model.safetensors) is written")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: what `latest` names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what was trained")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted")
    chosen = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        chosen.checkpoint_dir,
        chosen.output_dir,
        chosen.max_shard_size,
        chosen.safe_serialization,
        chosen.tag,
        chosen.exclude_frozen_parameters,
    )
