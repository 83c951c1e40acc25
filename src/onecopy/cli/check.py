"""`onecopy check`: print the effective configuration, with what each key does, or every problem in it."""

from __future__ import annotations

import argparse
import sys
import textwrap

from onecopy.config import Config, Examination, examine
from onecopy.config.report import WIDTH, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("config", metavar="CONFIG", help="JSON file (comments are fine), or base64 of JSON")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="number of ranks (default: environment variable WORLD_SIZE, else 1)"
    )
    parser.add_argument("--all", action="store_true", help="show the keys that were left out, with their defaults")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the notes; 1 when there are problems, which go to standard error."""
    result = examine(arguments.config, arguments.world_size)
    if result.config is not None:
        print(_headline(result.config), end="\n\n")
    if result.findings:
        print(report(result.findings, result.config if arguments.all else None))
    _print_problems(result)
    return 1 if result.problems else 0


def _headline(config: Config) -> str:
    """The run in one line: stage, ranks, precision and batch."""
    mode = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    ranks = f"{config.world_size} rank{'s' if config.world_size > 1 else ''} ({config.world_size_source})"
    batch = (
        f"{config.train_batch_size} samples a step = {config.train_micro_batch_size_per_gpu} x "
        f"{config.gradient_accumulation_steps} micro-batches x {config.world_size}"
    )
    return f"ZeRO stage {config.zero.stage} in {mode} on {ranks}: {batch}"


def _print_problems(result: Examination) -> None:
    if not result.problems:
        return
    sys.stdout.flush()
    count = len(result.problems)
    print(f"\n{count} problem{'s' if count > 1 else ''}" if result.findings else "error", file=sys.stderr)
    for problem in result.problems:
        lines = textwrap.wrap(problem, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
        print("\n".join(lines), file=sys.stderr)
