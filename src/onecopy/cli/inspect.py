"""`onecopy inspect`: list the checkpoints of a folder, with step, stage, ranks and sizes; no tensor is loaded."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("directory", metavar="DIR", help="folder of checkpoints, or of one of them")
    parser.add_argument("--tag", help="show one checkpoint's parameters")


def run(arguments: argparse.Namespace) -> int:
    """Print a table of checkpoints, or of one checkpoint's parameters."""
    from onecopy.checkpoint.look import show

    return show(arguments.directory, arguments.tag)
