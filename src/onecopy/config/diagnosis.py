"""What was found in a configuration: a verdict for every key written, notes, and every problem at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onecopy.config.keys import Verdict
from onecopy.config.kinds import show
from onecopy.errors import ConfigError

Origin = Literal["written", "default", "derived", "auto"]


class ConfigWarning(UserWarning):
    """A key was accepted, but it does not do what its name says."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One key's verdict: what `value` at `key_path` does in onecopy, in one sentence."""

    key_path: str
    value: Any
    verdict: Verdict
    message: str
    origin: Origin = "written"


@dataclass(slots=True)
class Diagnosis:
    """Collects findings, notes and problems while a configuration is read; nothing raises before the end."""

    verdicts: dict[str, Finding] = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def judge(self, path: str, value: Any, verdict: Verdict, message: str, origin: Origin = "written") -> None:
        """Record the verdict on a key; a "refused" one is a problem too."""
        self.verdicts[path] = Finding(path, value, verdict, message, origin)
        if verdict == "refused":
            self.problems.append(f"{path} = {show(value)}: {message}")

    def amend(self, path: str, verdict: Verdict, message: str) -> None:
        """Replace the verdict on a key already accepted; refused and absent keys are left alone."""
        old = self.verdicts.get(path)
        if old is not None and old.verdict != "refused":
            self.verdicts[path] = Finding(path, old.value, verdict, message, old.origin)

    def refuse(self, path: str, value: Any, message: str) -> None:
        """Record a problem at a key: `message` says what is wrong and what to write instead."""
        self.judge(path, value, "refused", message)

    def note(self, path: str, value: Any, message: str, warn: bool = False) -> None:
        """Say something about an accepted key; with `warn`, `load` also issues it as a Python warning."""
        self.notes.append(Finding(path, value, "note", message))
        if warn:
            self.warnings.append(f"{path} = {show(value)}: {message}")

    def arrange(self, document: Mapping[Any, Any]) -> None:
        """Put the verdicts in the order of the document's top level; keys that are not in it come last."""
        order = {str(name): index for index, name in enumerate(document)}
        rows = sorted(self.verdicts.items(), key=lambda row: order.get(row[0].split(".")[0], len(order)))
        self.verdicts = dict(rows)

    def findings(self) -> tuple[Finding, ...]:
        """All verdicts in the order of the document, then all notes."""
        return (*self.verdicts.values(), *self.notes)

    def error(self) -> ConfigError:
        """One error that names every problem."""
        return error_of(self.problems)


def error_of(problems: list[str]) -> ConfigError:
    """One error for several problems, each on its own line."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in problems))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is like it."""
    names = sorted(set(known))
    folded = {one.lower().replace("-", "_"): one for one in names}
    target = name.lower().replace("-", "_")
    if target in folded:
        return folded[target]
    close = difflib.get_close_matches(target[:200], folded, n=1, cutoff=0.6)
    if close:
        return folded[close[0]]
    inside = [one for one in folded if len(target) > 3 and (target in one or one in target)]
    return folded[max(inside, key=len)] if inside else None
