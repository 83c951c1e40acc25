"""Reads a block of the document into its schema class, and gives every key that was written a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from onecopy.config.diagnosis import Diagnosis
from onecopy.config.keys import Key, default_of, keys_of
from onecopy.config.kinds import Block, Mismatch, show, type_word

T = TypeVar("T")
OnUnknown = Callable[[str, Any, str], None]
"""Called with a name that the schema does not know, its value and its key path."""


def join(path: str, name: object) -> str:
    """The key path of `name` inside the block at `path`."""
    text = name if isinstance(name, str) else show(name)
    return f"{path}.{text}" if path else text


def read_block(cls: type[T], value: Any, path: str, diagnosis: Diagnosis, on_unknown: OnUnknown) -> T:
    """An instance of `cls` with the values of a block; problems are recorded, and their keys keep the default."""
    if not isinstance(value, Mapping):
        diagnosis.refuse(path, value, f"must be a block of keys, not {type_word(value)}; write it between braces")
        return cls()
    return cls(**read_values(cls, value, path, diagnosis, on_unknown))


def read_values(
    cls: type, block: Mapping[Any, Any], path: str, diagnosis: Diagnosis, on_unknown: OnUnknown
) -> dict[str, Any]:
    """The values of the fields of `cls` that the block gives, by field name."""
    known = {spelling: (one, key) for one, key in keys_of(cls) for spelling in key.spellings()}
    written: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, value in block.items():
        here = join(path, name)
        if not isinstance(name, str) or name not in known:
            on_unknown(name if isinstance(name, str) else show(name), value, here)
            continue
        one, key = known[name]
        if one.name in written:
            other = written[one.name]
            diagnosis.refuse(here, value, f'is the same key as "{other}"; keep one of the two')
            continue
        written[one.name] = name
        if name in key.deprecated:
            diagnosis.note(here, value, f'is an old name; write "{key.name}"')
        given, result = _read_value(one, key, value, here, diagnosis, on_unknown)
        if given:
            values[one.name] = result
    return values


def _read_value(
    one: dataclasses.Field[Any], key: Key, value: Any, path: str, diagnosis: Diagnosis, on_unknown: OnUnknown
) -> tuple[bool, Any]:
    """Whether a usable value was written, and the value. Records the verdict on it."""
    if value is None:
        return _read_null(one, key, path, diagnosis), None
    if isinstance(value, str) and value == "auto" and not _takes_auto(key):
        _read_auto(one, key, path, diagnosis)
        return False, None
    if isinstance(key.kind, Block):
        return True, read_block(key.kind.cls, value, path, diagnosis, on_unknown)
    try:
        result = key.kind.read(value)
    except Mismatch as mismatch:
        diagnosis.refuse(path, value, str(mismatch))
        return False, None
    verdict, message = (key.judge(result) if key.judge else None) or (key.verdict, key.effect)
    diagnosis.judge(path, value, verdict, message)
    return verdict != "refused", result


def _read_null(one: dataclasses.Field[Any], key: Key, path: str, diagnosis: Diagnosis) -> bool:
    """Record a null: an absent block or optional value, refused for any other key. Always False: no value is given."""
    default = show(default_of(one)) if not isinstance(key.kind, Block) else ""
    if key.nullable:
        diagnosis.judge(path, None, "ignored", "null reads as if the key were not written")
    else:
        diagnosis.refuse(
            path, None, f"must be {key.kind.describe()}, not null; remove the key to get the default {default}"
        )
    return False


def _takes_auto(key: Key) -> bool:
    """Whether "auto" is an ordinary value of this key."""
    words = getattr(key.kind, "words", ())
    return "auto" in words or (type(key.kind).__name__ == "Text" and not key.name.endswith("_path"))


def _read_auto(one: dataclasses.Field[Any], key: Key, path: str, diagnosis: Diagnosis) -> None:
    """Let "auto" stand for the default where the key allows it."""
    if not key.auto:
        what = "a block" if isinstance(key.kind, Block) else key.kind.describe()
        diagnosis.refuse(path, "auto", f'"auto" has no honest value here; write {what}')
        return
    default = default_of(one)
    word = key.default_word or show(default)
    diagnosis.judge(path, default, "ignored" if default is None else key.verdict, key.effect, "auto")
    diagnosis.note(path, "auto", f'"auto" takes the default, {word}')
