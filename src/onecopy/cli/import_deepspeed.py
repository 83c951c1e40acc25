"""`onecopy import-deepspeed`: turn a DeepSpeed ZeRO 1, 2, 3 or universal checkpoint into one that onecopy loads.

DeepSpeed need not be installed, and nothing that the files' pickles name is executed.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("directory", metavar="DIR", help="DeepSpeed's folder of checkpoints, or of one of them")
    parser.add_argument("output", metavar="OUT", help="folder of onecopy checkpoints to write into")
    parser.add_argument("--tag", help="which checkpoint (default: what `latest` names)")


def run(arguments: argparse.Namespace) -> int:
    """Import and say what was found."""
    from onecopy.checkpoint.deepspeed_import import import_deepspeed

    path, summary = import_deepspeed(arguments.directory, arguments.output, arguments.tag)
    print(f"{path}: {summary}")
    return 0
