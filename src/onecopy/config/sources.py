"""Where a document comes from: a dict, a JSON file with comments, JSON text, or base64 of JSON."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecopy.config.diagnosis import nearest
from onecopy.config.kinds import type_word
from onecopy.errors import ConfigError

_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')


def read_source(source: Any) -> dict[str, Any]:
    """The document as a dict: the user's own if a dict is given, never changed. Raises `ConfigError`."""
    if isinstance(source, dict):
        return source
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str):
        return _read_string(source)
    if isinstance(source, os.PathLike):
        return _read_file(Path(source))
    raise ConfigError(f"config is {type_word(source)}; give a dict, the path of a JSON file, or base64 of JSON")


def _read_string(source: str) -> dict[str, Any]:
    if not source.strip():
        raise ConfigError("config is an empty string; give a dict, the path of a JSON file, or base64 of JSON")
    if os.path.exists(source):
        return _read_file(Path(source))
    if source.lstrip().startswith("{"):
        return parse(source, "the JSON text given")
    decoded = _decode(source)
    if decoded is not None:
        return parse(decoded, "the base64 text given")
    raise _not_found(source)


def _decode(source: str) -> str | None:
    """The JSON text that a URL-safe base64 string holds, or None when it holds none."""
    text = source.strip().rstrip("=")
    if not re.fullmatch(r"[A-Za-z0-9_+/\s-]+", text):
        return None
    try:
        padded = text + "=" * (-len(text) % 4)
        decoded = base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=False).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _not_found(source: str) -> ConfigError:
    shown = source if len(source) <= 200 else source[:200] + "..."
    hint = ""
    if len(source) <= 1000 and "\0" not in source:
        path = Path(source)
        try:
            close = nearest(path.name, [one.name for one in path.absolute().parent.iterdir()])
        except OSError:
            close = None
        if close:
            hint = f'; did you mean "{path.parent / close}"?'
    return ConfigError(
        f'file not found: "{shown}" (from folder {os.getcwd()}){hint or "; give the path of an existing JSON file"}'
    )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise _not_found(str(path)) from None
    except IsADirectoryError:
        raise ConfigError(f'"{path}" is a folder; give the path of a JSON file in it') from None
    except UnicodeDecodeError:
        raise ConfigError(f'"{path}" is not text in UTF-8; give the path of a JSON file') from None
    except OSError as error:
        raise ConfigError(f'"{path}" cannot be read: {error.strerror}; check its permissions') from None
    return parse(text, f'"{path}"')


def parse(text: str, place: str) -> dict[str, Any]:
    """A JSON object with comments and trailing commas. `place` names the text in errors. Raises `ConfigError`."""
    plain = _TRAILING_COMMA.sub(lambda match: match.group(1) or " ", _TOKENS.sub(_blank_comment, text))
    try:
        document = json.loads(plain, object_pairs_hook=lambda pairs: _without_repeats(pairs, place))
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if error.lineno <= len(text.splitlines()) else ""
        near = f' near "{line[:80]}"' if line else ""
        raise ConfigError(
            f"{place} is not JSON at line {error.lineno}, column {error.colno}{near}: {error.msg}; correct that place"
        ) from None
    except RecursionError:
        raise ConfigError(f"{place} is nested too deeply to be a configuration; give a JSON object") from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{place} cannot be read: {error}; write ordinary numbers") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{place} holds {type_word(document)}; write a JSON object between braces")
    return document


def _blank_comment(match: re.Match[str]) -> str:
    """A string as it is; a comment as spaces, so that places in errors stay right."""
    token = match.group(0)
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)


def _without_repeats(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ConfigError(f'{place} has the key "{name}" twice in one block; keep one of the two')
        result[name] = value
    return result
