"""`onecopy plan`: memory, time and settings of a training run, before any GPU is rented."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (llama-13b, gpt2, ...), a folder or file with config.json, or package.module:function",
    )
    parser.add_argument("--gpus", default="8xA100-80GB", metavar="NxGPU", help="count and kind (default: %(default)s)")
    parser.add_argument(
        "--seq", type=int, metavar="TOKENS", help="tokens a sample (default: the model's longest, at most 4096)"
    )
    parser.add_argument(
        "--micro-batch", type=int, metavar="SAMPLES", help="samples a GPU and forward (default: the document's, else 1)"
    )
    parser.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), help="default: the document's, else the lowest from 1 that fits"
    )
    parser.add_argument(
        "--accumulation", type=int, metavar="STEPS", help="micro-batches a step (default: the document's, else 1)"
    )
    parser.add_argument(
        "--checkpointing",
        type=_checkpointing,
        metavar="HOW",
        help="of activations: none, selective, full or N for every N-th block (default: the document's, else none)",
    )
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default: the document's, else bf16")
    parser.add_argument(
        "--compile", action="store_true", help="units are compiled, as engine.compile() does (time only)"
    )
    parser.add_argument("--config", metavar="FILE", help="a DeepSpeed-style JSON to plan for; options say otherwise")
    parser.add_argument("--advise", action="store_true", help="search stage, micro-batch and checkpointing")
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="SAMPLES",
        help="samples of one optimizer step over all GPUs (with --advise)",
    )
    parser.add_argument("--write", metavar="FILE", help="write the recommended JSON")
    parser.add_argument("--html", metavar="FILE", help="write a report page")
    parser.add_argument("--trace", metavar="FILE", help="write the three lanes as a chrome trace")
    parser.add_argument(
        "--json", action="store_true", help="print everything as JSON (sizes in bytes, times in seconds)"
    )
    parser.add_argument("--hardware", metavar="FILE", help="a TOML file with GPUs of your own")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--context-gib", type=float, metavar="GIB", help="the CUDA context's memory, where you measured it"
    )
    parser.add_argument("--nccl-gib", type=float, metavar="GIB", help="NCCL's buffers, where you measured them")
    parser.add_argument(
        "--fragmentation", type=float, metavar="SHARE", help="of allocated memory, where you measured it (0.05 is 5 %%)"
    )


def _checkpointing(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; exit code 2 when the chosen setting does not fit."""
    from onecopy.plan.planning import plan

    overrides = {
        "context": None if arguments.context_gib is None else arguments.context_gib * GIB,
        "communication": None if arguments.nccl_gib is None else arguments.nccl_gib * GIB,
        "fragmentation": arguments.fragmentation,
    }
    answer = plan(
        arguments.model, arguments.gpus, arguments.seq, arguments.micro_batch, arguments.stage, arguments.accumulation,
        arguments.checkpointing,
        arguments.precision, arguments.config, arguments.advise or arguments.global_batch is not None, arguments.global_batch,
        arguments.hardware, arguments.gpus_per_node, overrides, arguments.compile,
    )  # fmt: skip
    if arguments.write:
        answer.write(arguments.write)
    if arguments.html:
        from onecopy.plan.report import page

        Path(arguments.html).write_text(page(answer), encoding="utf-8")
    if arguments.trace:
        Path(arguments.trace).write_text(json.dumps(answer.trace()), encoding="utf-8")
    print(json.dumps(answer.as_dict(), indent=2) if arguments.json else answer.text())
    if arguments.write:
        check = f"onecopy check {arguments.write} --world-size {answer.machine.count}"
        print(f"written: {arguments.write}; `{check}` says what its keys do", file=sys.stderr)
    return 0 if answer.chosen.fits or any(choice.fits for choice in answer.settings) else 2
