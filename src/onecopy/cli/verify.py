"""`onecopy verify`: read every byte of the checkpoints of a folder and compare checksums."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("directory", metavar="DIR", help="folder of checkpoints, or of one of them")
    parser.add_argument("--tag", help="verify this checkpoint only")


def run(arguments: argparse.Namespace) -> int:
    """Print what is wrong; 1 when something is."""
    from onecopy.checkpoint.look import verify

    return verify(arguments.directory, arguments.tag)
