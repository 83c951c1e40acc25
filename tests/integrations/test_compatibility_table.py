"""docs/compatibility.md says of the engine what is so, and every row has a verdict."""

from __future__ import annotations

import re

import onecopy
from tests.commands import ROOT

TEXT = (ROOT / "docs" / "compatibility.md").read_text()


def rows(part: str) -> list[tuple[list[str], str]]:
    """(names, verdict) of each row of the table under the heading."""
    table = TEXT.split(f"\n## {part}\n")[1].split("\n## ")[0]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| ") and "| verdict |" not in line]
    return [(re.findall(r"`([^`]+)`", first), verdict) for first, verdict, *_ in cells]


def test_every_row_has_a_verdict() -> None:
    found = [verdict for part in ("Top level", "Engine", "Modules") for _, verdict in rows(part)]
    assert len(found) > 40
    assert set(found) == {"honoured", "differs", "refused"}


def test_the_engine_has_what_the_table_says() -> None:
    for names, _ in rows("Engine"):
        for name in names:
            if "*" not in name:
                assert hasattr(onecopy.Engine, name), name
