"""The reference of all keys as Markdown, made from the schema: `python -m onecopy.config.reference docs/config.md`.

The part of the file between the two marks is replaced; a test holds that it is up to date.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from onecopy.config import features
from onecopy.config.document import Config
from onecopy.config.keys import Key, default_of, keys_of
from onecopy.config.kinds import Block, show
from onecopy.config.training import OPTIMIZER_PARAMETERS, REQUIRED, SCHEDULER_PARAMETERS

BEGIN, END = "<!-- keys: begin, made by onecopy.config.reference -->", "<!-- keys: end -->"


def reference() -> str:
    """Every key with its values, default and effect, block by block, as Markdown."""
    lines = ["## Top level", "", *_table(_rows(Config))]
    for title, cls in _blocks(Config, ""):
        lines += ["", f"## `{title}`", "", _sentence(cls), "", *_table(_rows(cls))]
    lines += ["", "## `optimizer.params`", "", "Any other parameter of the class is passed to it as it is.", ""]
    lines += _table(_parameter_row(key, default) for key, default in OPTIMIZER_PARAMETERS.values())
    for name, parameters in SCHEDULER_PARAMETERS.items():
        lines += ["", f"## `scheduler.params` of {name}", ""]
        lines += _table(_parameter_row(key, default) for key, default in parameters.values())
    lines += ["", "## Features that onecopy does not have", "", *_feature_lines()]
    return "\n".join(lines) + "\n"


def _blocks(cls: type, path: str) -> Iterator[tuple[str, type]]:
    for _, key in keys_of(cls):
        if isinstance(key.kind, Block):
            title = f"{path}{key.name}"
            yield title, key.kind.cls
            yield from _blocks(key.kind.cls, f"{title}.")


def _sentence(cls: type) -> str:
    """What the block is, from its docstring."""
    text = (cls.__doc__ or "").split("\n\n")[0].split("`: ", 1)[-1]
    return text[:1].upper() + text[1:]


def _rows(cls: type) -> Iterator[tuple[str, str, str, str]]:
    for one, key in keys_of(cls):
        if not isinstance(key.kind, Block):
            yield _row(one, key)


def _row(one: dataclasses.Field[object], key: Key) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in (key.name, *key.aliases))
    if key.deprecated:
        names += f" (once {', '.join(f'`{name}`' for name in key.deprecated)})"
    default = key.default_word or _value(default_of(one))
    return names, key.kind.describe(), default, _effect(key)


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"`{show(list(value))}`"
    return f"`{value:_}`" if type(value) is int and value >= 10_000 else f"`{show(value)}`"


def _effect(key: Key) -> str:
    words = "" if key.verdict == "honoured" else f"*{key.verdict}*: "
    text = f"{words}{key.effect}"
    if key.judge is not None:
        text += f"; {key.judge.describe()}"
    return text + (f" (stage {', '.join(map(str, key.stages))})" if len(key.stages) < 4 else "")


def _parameter_row(key: Key, default: object) -> tuple[str, str, str, str]:
    word = "must be written" if default is REQUIRED else "the optimizer's own" if default is None else _value(default)
    return f"`{key.name}`", key.kind.describe(), word, _effect(key)


def _table(rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    yield "| key | value | default | effect |"
    yield "|---|---|---|---|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _feature_lines() -> Iterator[str]:
    yield 'Accepted while switched off (`false`, `null`, `"enabled": false`), else refused:'
    yield ""
    for name, what in {**features.REFUSED, **features.REMOVED_FROM_ZERO}.items():
        place = "zero_optimization." if name in features.REMOVED_FROM_ZERO else ""
        yield f"- `{place}{name}`: {what}"
    yield ""
    yield "Without effect:"
    yield ""
    for name, why in {**features.IGNORED, **features.OBSERVERS}.items():
        yield f"- `{name}`: {why}"


def refresh(text: str) -> str:
    """`text` with the part between the marks replaced by the present reference."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
