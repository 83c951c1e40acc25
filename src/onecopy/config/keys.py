"""A key of the configuration is a dataclass field with its kind, its other spellings and its effect in its metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from onecopy.config.kinds import Block, Kind, show

Verdict = Literal["honoured", "implied", "refused", "ignored", "note"]
Judgement = tuple[Verdict, str]


class Judge(Protocol):
    """Gives some values of a key a verdict and an effect of their own."""

    def __call__(self, read: Any) -> Judgement | None:
        """The verdict and the sentence for a value, or None for the key's own."""
        ...

    def describe(self) -> str:
        """The special values with their sentences, as Markdown."""
        ...


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


@dataclass(frozen=True, slots=True)
class when:
    """A judge that gives `verdict` and `sentence` to one value and leaves the others to the key's own."""

    value: Any
    verdict: Verdict
    sentence: str

    def __call__(self, read: Any) -> Judgement | None:
        return (self.verdict, self.sentence) if type(read) is type(self.value) and read == self.value else None

    def describe(self) -> str:
        return _case(show(self.value), self.verdict, self.sentence)


@dataclass(frozen=True, slots=True)
class above:
    """A judge that gives `verdict` and `sentence` to numbers above `limit`."""

    limit: float
    verdict: Verdict
    sentence: str

    def __call__(self, read: Any) -> Judgement | None:
        return (self.verdict, self.sentence) if read is not None and read > self.limit else None

    def describe(self) -> str:
        return _case(f"above {self.limit:g}", self.verdict, self.sentence)


@dataclass(frozen=True, slots=True)
class given:
    """A judge that gives `verdict` and `sentence` to every value but null."""

    verdict: Verdict
    sentence: str

    def __call__(self, read: Any) -> Judgement | None:
        return None if read is None else (self.verdict, self.sentence)

    def describe(self) -> str:
        return _case("any block", self.verdict, self.sentence)


@dataclass(frozen=True, slots=True)
class cases:
    """A judge that gives each of several values a sentence of its own; all are honoured."""

    sentences: tuple[tuple[Any, str], ...]

    def __call__(self, read: Any) -> Judgement | None:
        found = [sentence for value, sentence in self.sentences if value == read]
        return ("honoured", found[0]) if found else None

    def describe(self) -> str:
        return "; ".join(f"`{show(value)}`: {sentence}" for value, sentence in self.sentences)


def _case(value: str, verdict: Verdict, sentence: str) -> str:
    return f"`{value}`: {'' if verdict == 'honoured' else verdict + ', '}{sentence}"
