"""The effective configuration as a table for people: key, value, verdict, effect; then the notes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from onecopy.config.diagnosis import Finding
from onecopy.config.keys import keys_of
from onecopy.config.kinds import Block, show

if TYPE_CHECKING:
    from onecopy.config.document import Config

WIDTH = 120
VALUE_WIDTH = 24


def report(findings: Iterable[Finding], every_default_of: Config | None = None) -> str:
    """The table and the notes as text; with a configuration, every key that was left out is a row too."""
    findings = list(findings)
    rows = [one for one in findings if one.verdict != "note"]
    if every_default_of is not None:
        rows += _defaults(every_default_of, {one.key_path for one in rows})
    lines = list(_table(rows))
    notes = [one for one in findings if one.verdict == "note"]
    if notes:
        lines += ["", "notes"]
        for one in notes:
            text = f"{one.key_path} = {show(one.value)}: {one.message}"
            lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def value_text(finding: Finding) -> str:
    """A value as the table shows it, with its origin when it was not written."""
    origin = "" if finding.origin == "written" else f" ({finding.origin})"
    value = finding.value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18 and abs(value) >= 10_000:
        value = int(value)
    text = f"{value:_}" if type(value) is int and abs(value) >= 10_000 else show(value, VALUE_WIDTH)
    return (text if len(text) <= VALUE_WIDTH else show(value, VALUE_WIDTH)) + origin


def _table(rows: list[Finding]) -> Iterator[str]:
    """Aligned lines; the keys of a block stand indented under its name."""
    cells: list[tuple[str, str, str, str]] = []
    opened: list[str] = []
    for one in sorted(rows, key=_by_block(rows)):
        *parents, name = one.key_path.split(".")
        for depth, parent in enumerate(parents):
            if opened[: depth + 1] != parents[: depth + 1]:
                opened = parents[: depth + 1]
                cells.append(("  " * depth + parent, "", "", ""))
        opened = parents
        message = "see the problems below" if one.verdict == "refused" else one.message
        cells.append(("  " * len(parents) + name, value_text(one), one.verdict, message))
    head = ("key", "value", "verdict", "effect")
    widths = [max(len(row[column]) for row in [head, *cells]) for column in range(3)]
    effect = max(WIDTH - sum(widths) - 6, 40)
    for row in [head, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-" * effect), *cells]:
        parts = textwrap.wrap(row[3], effect, break_on_hyphens=False) or [""]
        yield "  ".join([*(text.ljust(width) for text, width in zip(row[:3], widths)), parts[0]]).rstrip()
        for part in parts[1:]:
            yield " " * (sum(widths) + 6) + part


def _by_block(rows: list[Finding]) -> Callable[[Finding], tuple[int, ...]]:
    """A sort key that keeps the order of the rows but brings the keys of each block together."""
    first: dict[str, int] = {}
    for index, one in enumerate(rows):
        parts = one.key_path.split(".")
        for depth in range(len(parts)):
            first.setdefault(".".join(parts[: depth + 1]), index)

    def order(one: Finding) -> tuple[int, ...]:
        parts = one.key_path.split(".")
        return tuple(first[".".join(parts[: depth + 1])] for depth in range(len(parts)))

    return order


def _defaults(config: Config, seen: set[str]) -> Iterator[Finding]:
    """A row for every key of the schema that has none yet, with its default value."""
    yield from _defaults_of(config, "", seen)


def _defaults_of(values: object, path: str, seen: set[str]) -> Iterator[Finding]:
    for one, key in keys_of(type(values)):
        value = getattr(values, one.name)
        paths = [f"{path}.{spelling}" if path else spelling for spelling in key.spellings()]
        if isinstance(key.kind, Block):
            if value is not None:
                inner = next((p for p in paths if any(s.startswith(f"{p}.") for s in seen)), paths[0])
                yield from _defaults_of(value, inner, seen)
        elif not seen.intersection(paths):
            verdict, message = (key.judge(value) if key.judge and value is not None else None) or (
                key.verdict,
                key.effect,
            )
            yield Finding(paths[0], value, verdict, message, "default")
