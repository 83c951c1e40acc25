"""Names that a block does not know: an error where a misspelling would change memory or numbers, else a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onecopy.config import features
from onecopy.config.diagnosis import Diagnosis, nearest
from onecopy.config.document import Config
from onecopy.config.keys import keys_of
from onecopy.config.kinds import Block, Mismatch, Switch, show
from onecopy.config.reading import OnUnknown
from onecopy.config.zero import NO_OFFLOAD, REPLACED

STRICT = ("zero_optimization", "fp16", "bf16", "data_types", "torch_autocast", "onecopy")
"""Blocks in which an unknown name is an error; their inner blocks are as strict."""


def _names_by_block(cls: type = Config, path: str = "") -> dict[str, tuple[str, ...]]:
    """Every block's key path with the names it knows; the document itself is the empty path."""
    names: dict[str, tuple[str, ...]] = {}
    own: list[str] = ["optimizer", "scheduler"] if not path else []
    for _, key in keys_of(cls):
        own += key.spellings()
        if isinstance(key.kind, Block):
            names |= _names_by_block(key.kind.cls, f"{path}.{key.name}" if path else key.name)
    if not path:
        own += [*features.REFUSED, *features.IGNORED, *features.OBSERVERS]
        names |= {"optimizer": ("type", "params", "legacy_fusion"), "scheduler": ("type", "params")}
    return {path: tuple(own)} | names


NAMES = _names_by_block()
_BLOCKS = {
    spelling: key.name for _, key in keys_of(Config) if isinstance(key.kind, Block) for spelling in key.spellings()
}


def for_block(block: str, diagnosis: Diagnosis) -> OnUnknown:
    """What to do with unknown names inside the top-level block `block` ("" for the document itself)."""

    def on_unknown(name: str, value: Any, path: str) -> None:
        if not block:
            _at_top(name, value, path, diagnosis)
        elif block == "zero_optimization" and path.count(".") == 1 and _old_zero_key(name, value, path, diagnosis):
            pass
        elif block in STRICT:
            diagnosis.refuse(path, value, f"unknown key; {suggestion(name, path)}")
        else:
            warn_unknown(name, value, path, diagnosis)

    return on_unknown


def warn_unknown(name: str, value: Any, path: str, diagnosis: Diagnosis) -> None:
    """Record an unknown name that has no effect, with the nearest known one."""
    diagnosis.judge(path, value, "ignored", "unknown key")
    diagnosis.note(path, value, f"unknown key, ignored; {suggestion(name, path)}", warn=True)


def _at_top(name: str, value: Any, path: str, diagnosis: Diagnosis) -> None:
    if features.read_feature(name, value, path, diagnosis):
        return
    close = nearest(name, NAMES[""])
    if _BLOCKS.get(close or "") in STRICT and isinstance(value, (Mapping, bool)):
        # A misspelt block would lose all its keys, which is worse than a misspelt key in it.
        diagnosis.refuse(path, value, f'unknown block; did you mean "{close}"? correct the name or remove the block')
    else:
        warn_unknown(name, value, path, diagnosis)


def suggestion(name: str, path: str) -> str:
    """The nearest known name: in the same block, else the same name in another block."""
    parent = path.rpartition(".")[0]
    parent = (
        ".".join([_BLOCKS.get(parent.split(".")[0], parent.split(".")[0]), *parent.split(".")[1:]]) if parent else ""
    )
    known = NAMES.get(parent, ())
    elsewhere = [where for where, names in NAMES.items() if name in names and where != parent]
    close = nearest(name, known)
    if elsewhere and (close is None or close.lower() != name.lower()):
        full = f"{elsewhere[0]}.{name}" if elsewhere[0] else name
        return f'this key belongs {"in " + elsewhere[0] if elsewhere[0] else "at the top level"}: write "{full}"'
    if close is not None:
        return f'did you mean "{close}"? correct the name or remove the key'
    return (
        f"remove the key; known keys here are {', '.join(sorted(known))}" if 0 < len(known) <= 15 else "remove the key"
    )


def _old_zero_key(name: str, value: Any, path: str, diagnosis: Diagnosis) -> bool:
    """Record the verdict on a deprecated or removed key of `zero_optimization`. False when it is none."""
    if features.read_removed_from_zero(name, value, path, diagnosis):
        return True
    if name == "cpu_offload_use_pin_memory":
        diagnosis.judge(path, value, "ignored", "an old name without effect, as in DeepSpeed")
        return True
    if name not in REPLACED:
        return False
    new, spelled = REPLACED[name]
    if value is None or value == "auto":
        diagnosis.judge(path, value, "ignored", "switched off")
        return True
    try:
        on = Switch().read(value)
    except Mismatch as mismatch:
        diagnosis.refuse(path, value, str(mismatch))
        return True
    if on:
        diagnosis.refuse(path, value, f"means {spelled}; {NO_OFFLOAD}")
    else:
        diagnosis.judge(path, value, "ignored", "switched off")
        diagnosis.note(path, value, f'is an old name; write "{new}", or nothing, since {show(on)} is the default')
    return True
