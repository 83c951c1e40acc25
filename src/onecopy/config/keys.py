"""A key of the configuration is a dataclass field with its kind, its other spellings and its effect in its metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from onecopy.config.kinds import Block, Kind

Verdict = Literal["honoured", "implied", "refused", "ignored", "note"]
Judgement = tuple[Verdict, str]
Judge = Callable[[Any], Judgement | None]


@dataclass(frozen=True, slots=True)
class Key:
    """What the configuration knows of one key.

    `effect` is the sentence the report and the documentation print. `judge` may give one value another verdict; a
    "refused" one becomes an error. `auto` says whether "auto" may stand for the default. `stages` are the ZeRO stages
    at which the key has an effect.
    """

    kind: Kind
    effect: str
    verdict: Verdict = "honoured"
    name: str = ""
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()
    nullable: bool = False
    auto: bool = True
    judge: Judge | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    default_word: str = ""

    def spellings(self) -> tuple[str, ...]:
        """Every name that may be written for the key, the preferred one first."""
        return (self.name, *self.aliases, *self.deprecated)


def key(default: Any, kind: Kind, effect: str, **options: Any) -> Any:
    """A dataclass field for one key; `options` are the other fields of `Key`."""
    description = Key(kind, effect, nullable=options.pop("nullable", default is None), **options)
    if callable(default) and not isinstance(default, type):
        return field(default_factory=default, metadata={"key": description})
    return field(default=default, metadata={"key": description})


def block(cls: type, effect: str, *, optional: bool = False, **options: Any) -> Any:
    """A dataclass field for a nested block: `None` when absent if `optional`, else the block's defaults."""
    options.setdefault("auto", False)
    description = Key(Block(cls), effect, nullable=True, **options)
    if optional:
        return field(default=None, metadata={"key": description})
    return field(default_factory=cls, metadata={"key": description})


def keys_of(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Key]]:
    """The fields of a schema class that are keys, each with its `Key` completed by its JSON name."""
    for one in dataclasses.fields(cls):
        description = one.metadata.get("key")
        if description is not None:
            yield one, dataclasses.replace(description, name=description.name or one.name)


def default_of(one: dataclasses.Field[Any]) -> Any:
    """A field's default value."""
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return None if one.default is dataclasses.MISSING else one.default


def when(value: Any, verdict: Verdict, sentence: str) -> Judge:
    """A judge that gives `verdict` and `sentence` to one value and leaves the others to the key's own."""
    return lambda read: (verdict, sentence) if read == value and type(read) is type(value) else None


def above(limit: float, verdict: Verdict, sentence: str) -> Judge:
    """A judge that gives `verdict` and `sentence` to numbers above `limit`."""
    return lambda read: (verdict, sentence) if read is not None and read > limit else None
