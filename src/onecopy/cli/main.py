"""`onecopy VERB ...`: finds the verbs as modules of this folder and imports only the one that is asked for.

A verb's module begins with the docstring "`onecopy VERB`: what it does" and has `add_arguments(parser)` and
`run(arguments) -> int`, the exit code.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from onecopy.errors import OneCopyError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors of onecopy are printed without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if not word.startswith("-")), None)
    arguments = _parser(verb).parse_args(words)
    try:
        code: int = _module(arguments.verb).run(arguments)
        return code
    except OneCopyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        sys.stderr.close()
        return 1
    except OSError as error:
        if not error.filename:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def verbs() -> dict[str, str]:
    """Every verb with the sentence its module begins with; nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        if path.name != Path(__file__).name:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            sentence = re.sub(r"^`[^`]*`:\s*", "", text.split("\n\n")[0].replace("\n", " "))
            found[path.stem.replace("_", "-")] = sentence.rstrip(".")
    return found


def _module(verb: str) -> ModuleType:
    return importlib.import_module(f"onecopy.cli.{verb.replace('-', '_')}")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all verbs, with the arguments of the chosen one only."""
    parser = argparse.ArgumentParser(
        prog="onecopy", description="Train with ZeRO: one copy of every training state across all ranks."
    )
    parsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, sentence in verbs().items():
        one = parsers.add_parser(verb, help=sentence, description=sentence[:1].upper() + sentence[1:] + ".")
        if verb == chosen:
            _module(verb).add_arguments(one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
