"""What a trial runs: the user's script with a configuration of ours in place of theirs, or `onecopy train` with it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onecopy.config.sources import read_source
from onecopy.errors import ConfigError, OneCopyError

OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--ds_config", "--ds-config", "--deepspeed", "--config")
_ENDLESS = "1000000"  # steps: a trial is ended from outside once it has been measured


@dataclass(frozen=True)
class Target:
    """A command that trains, and the configuration it would use.

    Attributes:
        base: the user's own document.
        words: of the command, after `python -m onecopy`; `where` is the place of the configuration's path among them.
        prefix: what stands before the path in that word ("--config=" where it was written so).
    """

    base: dict[str, Any]
    words: tuple[str, ...]
    where: int
    prefix: str = ""
    trains_here: bool = False

    def command(self, config: Path, folder: Path) -> list[str]:
        """The command of a trial whose configuration is `config`."""
        words = list(self.words)
        words[self.where] = f"{self.prefix}{config}"
        if self.trains_here:
            words += ["--folder", str(folder / "run")]
        return [sys.executable, "-m", "onecopy", *words]


def target_for(text: str, ranks: int, arguments: Sequence[str] = (), config: str | None = None) -> Target:
    """What `text` names: a training script (.py) with its arguments, or a configuration for `onecopy train`.

    Args:
        arguments: of the script, or more options of `onecopy train`.
        config: the configuration of a script whose arguments name none; it gets `--deepspeed_config`.

    Raises:
        OneCopyError: there is no such file, or nothing names a configuration.
    """
    path = Path(text)
    if not path.is_file():
        raise OneCopyError(f"'{text}' is no file; give a training script (.py) or a configuration (.json)")
    if path.suffix != ".py":
        words = [
            "train",
            "--nproc",
            str(ranks),
            "--steps",
            _ENDLESS,
            "--evaluate-every",
            _ENDLESS,
            "--log-every",
            _ENDLESS,
        ]
        return Target(
            _document(text), (*words, *arguments, "--config", ""), len(words) + len(arguments) + 1, trains_here=True
        )
    words = ["run", "--force", "--nproc", str(ranks), text]
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in OPTIONS and equals:
            return Target(_document(value), (*words, *arguments), len(words) + place, f"{name}=")
        if name in OPTIONS and place + 1 < len(arguments) and Path(arguments[place + 1]).is_file():
            return Target(_document(arguments[place + 1]), (*words, *arguments), len(words) + place + 1)
    if config is None:
        raise OneCopyError(
            f"the arguments of {text} name no configuration; add --deepspeed_config FILE after the script, or --config FILE before it"
        )
    return Target(_document(config), (*words, *arguments, "--deepspeed_config", ""), len(words) + len(arguments) + 1)


def _document(path: str) -> dict[str, Any]:
    document = copy.deepcopy(read_source(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no JSON object")
    return document
