"""The kinds of value a configuration key may hold: each reads one JSON value, or says what to write instead."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Mismatch(ValueError):
    """A value is not of its key's kind; the text says what is wrong and what to write instead."""


class Kind(Protocol):
    """Reads a JSON value into a Python value, and describes itself for the documentation."""

    def read(self, value: Any) -> Any:
        """The value as the engine uses it. Raises `Mismatch`."""
        ...

    def describe(self) -> str:
        """Type, unit and range in a few words."""
        ...


def show(value: Any, limit: int = 60) -> str:
    """A value as a JSON writer would recognise it, cut to `limit` characters."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
    except Exception:  # an int of thousands of digits, or an object whose repr fails
        text = f"a value of type {type(value).__name__}"
    if isinstance(value, numbers.Integral) and len(text) > 20:
        text = f"about 1e{len(text.lstrip('-')) - 1}" if text[-1].isdigit() else text
    return text if len(text) <= limit else text[: limit - 3] + "..."


def type_word(value: Any) -> str:
    """The JSON word for a value's type."""
    if value is None:
        return "null"
    for types, word in (
        (bool, "a boolean"),
        (str, "a string"),
        (numbers.Integral, "an integer"),
        (numbers.Real, "a number"),
        (Mapping, "a block"),
        ((list, tuple), "a list"),
    ):
        if isinstance(value, types):
            return word
    return f"a Python {type(value).__name__}"


def _number_in(text: str) -> float | None:
    """The finite number a string spells, or None."""
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _refuse_non_number(value: Any, wanted: str) -> None:
    if isinstance(value, str):
        number = _number_in(value)
        if number is None:
            raise Mismatch(f"must be {wanted}, not a string; write a number")
        spelled = f"{number:.0f}" if number == int(number) and abs(number) < 1e15 else f"{number:g}"
        raise Mismatch(f"must be {wanted}, not a string; write {spelled} without quotes")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Mismatch(f"must be {wanted}, not {type_word(value)}; write a number")


def _bounds(minimum: float | None, maximum: float | None, open_minimum: bool = False) -> str:
    parts = []
    if minimum is not None:
        parts.append(f"greater than {minimum:g}" if open_minimum else f"at least {minimum:g}")
    if maximum is not None:
        parts.append(f"at most {maximum:g}")
    return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Switch:
    """true or false; 0 and 1 are read as such."""

    def read(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, numbers.Integral) and value in (0, 1):
            return bool(value)
        hint = "; write one of the two"
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            hint = f"; write {value.strip().lower()} without quotes"
        raise Mismatch(f"must be true or false, not {type_word(value)}{hint}")

    def describe(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number; 5e8 counts as one, "5e8" and 0.5 do not."""

    minimum: int | None = None
    maximum: int | None = None
    unit: str = ""
    infinity: bool = False

    def read(self, value: Any) -> int | None:
        if self.infinity and isinstance(value, float) and value == math.inf:
            return None
        _refuse_non_number(value, self._wanted())
        if isinstance(value, numbers.Integral) or (math.isfinite(value) and float(value).is_integer()):
            number = int(value)
        elif math.isfinite(value):
            raise Mismatch(f"must be {self._wanted()}, not a fraction; write {max(round(value), self.minimum or 0)}")
        else:
            raise Mismatch(f"must be {self._wanted()}, and finite; write a whole number")
        low = self.minimum is not None and number < self.minimum
        high = self.maximum is not None and number > self.maximum
        if low or high:
            raise Mismatch(
                f"must be {self._wanted()}; write {self.minimum if low else self.maximum} or another such value"
            )
        return number

    def _wanted(self) -> str:
        bounds = _bounds(self.minimum, self.maximum)
        return "an integer" + (f" of {self.unit}" if self.unit else "") + (f", {bounds}" if bounds else "")

    def describe(self) -> str:
        return self._wanted().removeprefix("an ")


@dataclass(frozen=True, slots=True)
class Number:
    """A finite real number."""

    minimum: float | None = None
    maximum: float | None = None
    open_minimum: bool = False
    unit: str = ""

    def read(self, value: Any) -> float:
        _refuse_non_number(value, self._wanted())
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise Mismatch(f"must be {self._wanted()}, and finite; write an ordinary number")
        low = self.minimum is not None and (number < self.minimum or (self.open_minimum and number == self.minimum))
        if low or (self.maximum is not None and number > self.maximum):
            raise Mismatch(f"must be {self._wanted()}; write a value in that range")
        return number

    def _wanted(self) -> str:
        bounds = _bounds(self.minimum, self.maximum, self.open_minimum)
        return "a number" + (f" of {self.unit}" if self.unit else "") + (f", {bounds}" if bounds else "")

    def describe(self) -> str:
        return self._wanted().removeprefix("a ")


@dataclass(frozen=True, slots=True)
class Text:
    """A string taken as it is."""

    empty: bool = True

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise Mismatch(f"must be a string, not {type_word(value)}; put it in quotes")
        if not self.empty and not value.strip():
            raise Mismatch("must be a string that is not empty; write a name")
        return value

    def describe(self) -> str:
        return "string"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words, in any case."""

    options: tuple[str, ...]

    def read(self, value: Any) -> str:
        if isinstance(value, str):
            for option in self.options:
                if option.lower() == value.lower():
                    return option
        raise Mismatch(f"must be one of {self.describe()}; write one of these words in quotes")

    def describe(self) -> str:
        return ", ".join(f'"{option}"' for option in self.options)


@dataclass(frozen=True, slots=True)
class ChoiceOrInteger:
    """One of a few words, or a whole number of at least 1."""

    options: tuple[str, ...]

    def read(self, value: Any) -> str | int:
        try:
            if isinstance(value, str):
                return Choice(self.options).read(value)
            number = Integer(1).read(value)
        except Mismatch:
            number = None
        if number is None:
            raise Mismatch(f"must be {self.describe()}; write one of these")
        return number

    def describe(self) -> str:
        return f"{Choice(self.options).describe()} or an integer, at least 1"


@dataclass(frozen=True, slots=True)
class StageNumber:
    """The ZeRO stage: 0, 1, 2 or 3, also spelled "3", 3.0 or true (which is 1)."""

    def read(self, value: Any) -> int:
        number = value
        if isinstance(value, str):
            number = _number_in(value)
        if isinstance(number, numbers.Real) and number in (0, 1, 2, 3):
            return int(float(number))
        raise Mismatch("must be 0, 1, 2 or 3; write the ZeRO stage as an integer")

    def describe(self) -> str:
        return "0, 1, 2 or 3"


DTYPE_NAMES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class DType:
    """A floating-point type by name, in any case; read as a `torch.dtype`."""

    def read(self, value: Any) -> Any:
        name = DTYPE_NAMES.get(str(value).lower().removeprefix("torch."))
        if name is None or isinstance(value, (bool, numbers.Number)):
            hint = "; did you mean bf16?" if str(value).lower() in ("bfp16", "bf", "fp16b", "bfloat") else ""
            raise Mismatch(f"must be one of {self.describe()}{hint or '; write one of these names in quotes'}")
        import torch  # here, because a command that only prints help must not wait for torch

        return getattr(torch, name)

    def describe(self) -> str:
        return '"fp32", "fp16" or "bf16"'


@dataclass(frozen=True, slots=True)
class Names:
    """A list of strings; a single string is a list of one. `words` are strings kept as they are, such as "auto"."""

    words: tuple[str, ...] = ()

    def read(self, value: Any) -> str | tuple[str, ...]:
        if isinstance(value, str):
            return value if value in self.words else (value,)
        if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise Mismatch(f"must be {self.describe()}; write the names in quotes between brackets")

    def describe(self) -> str:
        return "".join(f'"{word}" or ' for word in self.words) + "a list of strings"


def _in_unit_interval(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two numbers in [0, 1), such as Adam's betas."""

    def read(self, value: Any) -> list[float]:
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(_in_unit_interval(one) for one in value):
            return [float(one) for one in value]
        raise Mismatch("must be a list of two numbers, each at least 0 and below 1; write for instance [0.9, 0.999]")

    def describe(self) -> str:
        return "list of two numbers in [0, 1)"


@dataclass(frozen=True, slots=True)
class PerGroup:
    """A number for all groups of the optimizer, or a list with one for each."""

    minimum: float | None = None
    maximum: float | None = None

    def read(self, value: Any) -> float | list[float]:
        number = Number(self.minimum, self.maximum)
        return [number.read(one) for one in value] if isinstance(value, (list, tuple)) and value else number.read(value)

    def describe(self) -> str:
        return f"{Number(self.minimum, self.maximum).describe()}, or a list of one a group"


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value, kept as it is."""

    def read(self, value: Any) -> Any:
        return value

    def describe(self) -> str:
        return "any value"


@dataclass(frozen=True, slots=True)
class Block:
    """A nested block, read by the schema class `cls` (see `reading`)."""

    cls: type

    def read(self, value: Any) -> Any:
        raise AssertionError("blocks are read by reading.read_block")

    def describe(self) -> str:
        return "block"
